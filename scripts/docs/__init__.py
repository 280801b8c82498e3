"""Writers of documentation: tables and pictures of what was measured, tested and stated in code, and the site."""

"""What measures, documents and trains; each is run from the repository as `python -m scripts.FOLDER.NAME`."""

"""Programs that measure, document and train; each is run from the repository as `python -m scripts.FOLDER.NAME`."""

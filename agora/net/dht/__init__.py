"""The directory of signed records: storage, search, and a reader without a daemon."""

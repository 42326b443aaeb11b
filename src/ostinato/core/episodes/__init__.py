"""Episodes: the fields that end them, and the table of where they lie."""

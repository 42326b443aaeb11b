"""Episodes: the fields that mark their ends, and the table of their rows."""

"""Words: records and the door for data; no policy lives here."""

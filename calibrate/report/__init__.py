"""The report of a calibration: the plan, the tables, the sentences, the pictures and the pages."""

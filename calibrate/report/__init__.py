"""What a user sees of a calibration: the plan, the tables, the pictures, and the report beside the profile."""

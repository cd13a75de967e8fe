"""Studies as folders of plain files, to be kept, sent to someone, or read by other tools, and taken in again."""

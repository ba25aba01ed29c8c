"""One stage each: submit, watch, judge, show."""

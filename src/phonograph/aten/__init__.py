"""What operators mean for a recording: what each writes, collectives, autocast."""

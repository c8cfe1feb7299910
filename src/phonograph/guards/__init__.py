"""What a recording relies on outside of its arguments, and how a replay knows that it is unchanged."""

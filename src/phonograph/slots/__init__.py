"""What a recording exchanges with the world, as columns of one table. (Begin at `table.py`.)"""

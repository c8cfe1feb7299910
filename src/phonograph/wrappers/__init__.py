"""What stands in the place of people's functions and modules, and `make_graphed_callables`."""

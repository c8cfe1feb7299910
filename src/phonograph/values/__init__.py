"""Values of a call: what identifies them, and how nested ones are taken apart."""

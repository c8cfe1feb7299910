"""A backward that runs outside of the recorded call: what is saved for it, and how it is recorded itself."""

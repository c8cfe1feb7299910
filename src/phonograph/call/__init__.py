"""What call is this? The description that decides which recording fits."""

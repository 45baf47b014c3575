"""The public surfaces of the gateway, and the one path under all of them."""

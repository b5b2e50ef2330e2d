"""The ground both pools and the router stand on."""

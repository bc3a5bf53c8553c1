"""What browsers and Prometheus get over HTTP: read only, on loopback unless told otherwise."""

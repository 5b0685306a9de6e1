"""Values of the request interface: parameters, configuration, requests, records, block hashes. Loads no torch."""

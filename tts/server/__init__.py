"""The gRPC server: access, calls and the two services."""

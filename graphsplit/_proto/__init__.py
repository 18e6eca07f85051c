"""Generated from proto/: see the header of each .proto file for how. Do not edit."""

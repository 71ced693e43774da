"""What all papers share: transcribed numbers, recordings, claims, the catalog."""

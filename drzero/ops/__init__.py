"""What keeps a run alive and explains its end. It knows no recipe and imports no other room."""

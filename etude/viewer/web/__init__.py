"""`etude view DIR --web`: shows a run in a browser."""

"""`etude view DIR --web`: a run's files as pages in a browser."""

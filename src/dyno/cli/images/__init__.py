"""Commands whose input is images or a video of your own."""

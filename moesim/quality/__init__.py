"""What a byte saved costs in quality: measured on real models, with real quantised bytes."""

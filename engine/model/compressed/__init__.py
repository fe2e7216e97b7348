"""Models with compressed attention and hyper-connections (DeepSeek-V4): their layers, over the paged cache."""

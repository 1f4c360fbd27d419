//! Tests of downloads from a local server in place of the Hugging Face hub, and of the cache of downloaded models.

mod cached;
mod pull;

//! Specifications, shapes and weights of models.

mod cache_groups;
mod recipe;
mod rwkv;
mod shapes;
mod spec;
mod weights;

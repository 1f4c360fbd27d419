//! Tests of model specs, cache groups, quantisation recipes, named shapes and weights.

mod cache_groups;
mod gated_attention;
mod recipe;
mod rwkv;
mod shapes;
mod spec;
mod vision;
mod weights;

//! Tests of model specs, prediction heads, cache groups, quantisation recipes, named shapes and weights.

mod cache_groups;
mod gated_attention;
mod heads;
mod recipe;
mod rwkv;
mod shapes;
mod spec;
mod vision;
mod weights;

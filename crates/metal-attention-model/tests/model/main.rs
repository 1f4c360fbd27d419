//! Tests of model specs, prediction heads, assistants, cache groups, quantisation recipes, named shapes and weights.

mod assistant;
mod cache_groups;
mod dflash;
mod gated_attention;
mod heads;
mod recipe;
mod rwkv;
mod shapes;
mod spec;
mod vision;
mod weights;

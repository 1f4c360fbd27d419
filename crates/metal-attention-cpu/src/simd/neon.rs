//! The vector operations on Arm NEON: four registers each.

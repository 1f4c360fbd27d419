//! The command `kernels`, which lists the wgpu shaders and prints one in WGSL, MSL, HLSL or SPIR-V.
#![cfg(feature = "wgpu")]

use crate::common::{run, stderr, stdout};

#[test]
fn names_are_listed_one_per_line() {
    let names = stdout(run(&["kernels"]));
    let names: Vec<_> = names.lines().collect();
    assert!(names.is_sorted());
    for name in ["argmax", "ffn_silu", "residual_add", "rmsnorm"] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
}

#[test]
fn a_kernel_is_printed_in_every_shader_language() {
    let print = |flags: &[&str]| stdout(run(&[&["kernels", "rmsnorm"], flags].concat()));
    let wgsl = print(&[]);
    assert!(wgsl.contains("@compute") && wgsl.contains("subgroupShuffleXor"), "{wgsl}");
    assert_eq!(wgsl, print(&["--emit", "wgsl"]));
    let plain = print(&["--no-subgroups", "--no-f16", "--no-matrix-units"]);
    assert!(plain.contains("@compute") && !plain.contains("subgroup"), "{plain}");
    let metal = print(&["--emit", "msl"]);
    assert!(metal.contains("#include <metal_stdlib>") && metal.contains("simd_shuffle_xor"), "{metal}");
    let directx = print(&["--emit", "hlsl", "--subgroup-size", "64"]);
    assert!(directx.contains("[numthreads(256, 1, 1)]") && directx.contains("WaveReadLaneAt"), "{directx}");
    let spirv = print(&["--emit", "spirv"]);
    assert!(spirv.starts_with("000000: 07230203 00010600 "), "{spirv}");
}

#[test]
fn a_kernel_is_written_to_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("argmax.spv");
    assert_eq!(stdout(run(&["kernels", "argmax", "--emit", "spirv", "-o", path.to_str().unwrap()])), "");
    let code = std::fs::read(&path).unwrap();
    assert_eq!((&code[..4], code.len() % 4), (&[3, 2, 0x23, 7][..], 0));
}

#[test]
fn wrong_usage_is_2() {
    for (args, part) in [
        (&["kernels", "nonsense"][..], "lists their names"),
        (&["kernels", "--emit", "msl"], "NAME"),
        (&["kernels", "rmsnorm", "--emit", "glsl"], "hlsl"),
        (&["kernels", "rmsnorm", "--subgroup-size", "33"], "32, 64"),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
    }
}

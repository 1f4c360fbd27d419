//! The layouts of the argument structures, and `kernels/args_layout.cuh`, which holds the C++ side to them.

use std::fmt::Write as _;
use std::path::Path;

use super::{attention, decode, encoder, exchange, experts, latent, products, recurrent, rows};
use crate::kernels::TABLE;

/// A structure of kernel arguments that C++ declares, too.
pub(crate) trait KernelStruct {
    /// Its name in C++.
    const CPP_NAME: &'static str;
}

/// The layout of a structure.
pub(crate) struct StructLayout {
    /// Its name in C++.
    pub(super) cpp_name: &'static str,
    /// The file of `kernels/` that declares it.
    pub(super) file: &'static str,
    /// Its bytes.
    pub(super) size: usize,
    /// Its fields, with their offsets in bytes.
    pub(super) offsets: &'static [(&'static str, usize)],
}

/// All structures.
fn layouts() -> impl Iterator<Item = &'static StructLayout> {
    let files = [
        products::LAYOUTS,
        attention::LAYOUTS,
        rows::LAYOUTS,
        experts::LAYOUTS,
        latent::LAYOUTS,
        recurrent::LAYOUTS,
        exchange::LAYOUTS,
        decode::LAYOUTS,
        encoder::LAYOUTS,
    ];
    files.into_iter().flatten()
}

/// The contents of `kernels/args_layout.cuh`.
fn header() -> String {
    let mut text = "\
// Generated from src/args.rs, where the host declares the arguments of the kernels: the sizes and offsets of the same structures here.
// `ASSERT_LAYOUT(S);` after the declaration of S compares them. To write this file anew:
//   METAL_ATTENTION_WRITE_LAYOUTS=1 cargo test -p metal-attention-cuda --lib layout
#pragma once
#include <stddef.h>

#define ASSERT_LAYOUT(S) LAYOUT_OF_##S(S)
#define SIZE_IS(S, SIZE) static_assert(sizeof(S) == SIZE, \"the size differs from that in src/args\")
#define FIELD_IS_AT(S, FIELD, OFFSET) static_assert(offsetof(S, FIELD) == OFFSET, \"the offset differs from that in src/args\")
"
    .to_owned();
    for StructLayout { cpp_name, file, size, offsets } in layouts() {
        write!(text, "\n// {file}\n#define LAYOUT_OF_{cpp_name}(S) SIZE_IS(S, {size})").unwrap();
        for (field, offset) in *offsets {
            write!(text, "; \\\n    FIELD_IS_AT(S, {field}, {offset})").unwrap();
        }
        text.push('\n');
    }
    text
}

/// The contents of `software/entry_points.inc`: a line for each kernel.
fn entry_points() -> String {
    let mut text = "\
// Generated from src/kernels.rs, which lists the kernels that the host launches: module, kernel, argument. scripts/software-cuda
// compares it with the kernels that it compiles. Written anew as kernels/args_layout.cuh is.
"
    .to_owned();
    for entry in TABLE {
        writeln!(text, "ENTRY_POINT({}, {}, {})", entry.module, entry.name, entry.args).unwrap();
    }
    text
}

/// Compares a generated file with its new contents, or writes it.
#[track_caller]
fn assert_current(path: &str, contents: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("METAL_ATTENTION_WRITE_LAYOUTS").is_some() {
        std::fs::write(&file, contents).unwrap();
    }
    let recorded = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        recorded == contents,
        "{path} is not what src/args and src/kernels.rs declare: run METAL_ATTENTION_WRITE_LAYOUTS=1 cargo test -p metal-attention-cuda \
         --lib layout, then scripts/cuda-kernels"
    );
}

#[test]
fn generated_layouts_are_current() {
    assert_current("kernels/args_layout.cuh", &header());
    assert_current("software/entry_points.inc", &entry_points());
}

#[test]
fn each_layout_is_asserted_in_its_file() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    for StructLayout { cpp_name, file, .. } in layouts() {
        let source = std::fs::read_to_string(kernels.join(file)).unwrap();
        assert!(
            source.contains(&format!("\nASSERT_LAYOUT({cpp_name});\n")),
            "kernels/{file} does not assert {cpp_name}"
        );
    }
    let names: std::collections::BTreeSet<_> = layouts().map(|layout| layout.cpp_name).collect();
    assert_eq!(names.len(), layouts().count(), "a structure is declared once");
}

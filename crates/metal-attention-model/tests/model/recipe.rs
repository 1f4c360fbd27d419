//! The tensor types that quantisation recipes choose, against those that llama.cpp's quantiser chooses for the same models
//! (`tests/data/recipes.txt`).

use std::collections::HashMap;

use metal_attention_gguf::{Metadata, TensorDecl, TensorType};
use metal_attention_model::{Recipe, TypeChoices};

const TABLE: &str = include_str!("../../../../tests/data/recipes.txt");

/// The sizes in a `model` line of the table, by name.
struct Sizes<'a>(HashMap<&'a str, &'a str>);

impl<'a> Sizes<'a> {
    fn new(line: &'a str) -> Self {
        Self(line.split(' ').filter_map(|word| word.split_once('=')).collect())
    }

    /// A size as a number; 0 if it is absent, 1 for True.
    fn get(&self, key: &str) -> usize {
        self.0.get(key).map_or(0, |n| if *n == "True" { 1 } else { n.parse().unwrap() })
    }

    /// The metadata of a model with these sizes.
    fn metadata(&self) -> Metadata {
        let arch = self.0["arch"];
        let mut metadata = Metadata::new();
        metadata.set("general.architecture", arch);
        for (key, size) in [
            ("block_count", "layers"),
            ("attention.head_count", "heads"),
            ("attention.head_count_kv", "kv"),
            ("embedding_length", "embd"),
            ("expert_count", "experts"),
        ] {
            metadata.set(format!("{arch}.{key}"), self.get(size) as u32);
        }
        metadata
    }

    /// The tensors of a model with these sizes, as far as types depend on them.
    fn tensors(&self) -> Vec<TensorDecl> {
        let (embd, ff, experts) = (self.get("embd"), self.get("ff"), self.get("experts"));
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize]| {
            tensors.push(TensorDecl { name: name + ".weight", shape: shape.to_vec(), ty: TensorType::F32 });
        };
        add("token_embd".into(), &[embd, 64]);
        if self.get("tied") == 0 {
            add("output".into(), &[embd, 64]);
        }
        add("output_norm".into(), &[embd]);
        add("rope_freqs".into(), &[16]);
        for i in 0..self.get("layers") {
            let name = |role: &str| format!("blk.{i}.{role}");
            add(name("attn_norm"), &[embd]);
            if self.get("fused") == 1 {
                add(name("attn_qkv"), &[embd, 32]);
            } else {
                for role in ["attn_q", "attn_k", "attn_v"] {
                    add(name(role), &[embd, 32]);
                }
            }
            add(name("attn_output"), &[embd, 16]);
            if experts > 0 {
                add(name("ffn_gate_inp"), &[embd, experts]);
                add(name("ffn_gate_exps"), &[embd, 4, experts]);
                add(name("ffn_up_exps"), &[embd, 4, experts]);
                add(name("ffn_down_exps"), &[ff, 4, experts]);
            } else {
                if self.get("fused") == 0 {
                    add(name("ffn_gate"), &[embd, 8]);
                }
                add(name("ffn_up"), &[embd, 8]);
                add(name("ffn_down"), &[ff, 8]);
            }
        }
        tensors
    }
}

/// The type of the tensor `name` in a line of the table.
fn expected<'a>(line: &HashMap<&'a str, &'a str>, name: &str) -> &'a str {
    let name = name.strip_suffix(".weight").unwrap();
    let mut parts = name.splitn(3, '.');
    let (layer, role) = match (parts.next(), parts.next(), parts.next()) {
        (Some("blk"), Some(layer), Some(role)) => (layer.parse().unwrap(), role),
        _ => (0, name),
    };
    if role.ends_with("norm") || role == "rope_freqs" {
        return "F32";
    }
    let types =
        line.iter().find(|(roles, _)| roles.split(',').any(|r| r == role)).map_or(line["*"], |(_, types)| types);
    let mut types = types.split('+');
    let default_type = types.next().unwrap();
    let has = |layers: &str| {
        layers.split(',').any(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            (first.parse::<usize>().unwrap()..=last.parse().unwrap()).contains(&layer)
        })
    };
    types.filter_map(|other| other.split_once('@')).find(|(_, layers)| has(layers)).map_or(default_type, |(ty, _)| ty)
}

#[test]
fn types_equal_those_of_llama_cpp() {
    let mut sizes = None;
    let mut compared = 0;
    for line in TABLE.lines().filter(|line| !line.starts_with('#')) {
        if line.starts_with("model ") {
            sizes = Some((line, Sizes::new(line)));
            continue;
        }
        let (model, sizes) = sizes.as_ref().unwrap();
        let (name, types) = line.split_once(' ').unwrap();
        let types = types.split(' ').filter_map(|word| word.split_once('=')).collect();
        let (name, importance) = name.strip_suffix("+imatrix").map_or((name, false), |name| (name, true));
        let recipe = Recipe::named(&name.to_lowercase()).unwrap();
        let tensors = sizes.tensors();
        let choices = TypeChoices { importance, ..Default::default() };
        let found = recipe.types(&sizes.metadata(), &tensors, &choices);
        for (tensor, found) in tensors.iter().zip(found) {
            assert_eq!(found.name(), expected(&types, &tensor.name), "{model}: {line}: {}", tensor.name);
            compared += 1;
        }
    }
    assert!(compared > 60_000, "only {compared}");
}

#[test]
fn recipes_named_like_a_type_give_it_to_all_matrices() {
    let sizes = Sizes::new("arch=llama layers=32 heads=8 kv=2 embd=256 ff=256 experts=8");
    let tensors = sizes.tensors();
    for (name, head) in [("q4_k", "Q6_K"), ("Q3_K", "Q6_K"), ("mxfp4", "Q6_K"), ("nvfp4", "Q6_K")] {
        let types = Recipe::named(name).unwrap().types(&sizes.metadata(), &tensors, &TypeChoices::default());
        for (tensor, ty) in tensors.iter().zip(types) {
            let name = match tensor.name.as_str() {
                "output.weight" => head.to_owned(),
                other if other.contains("norm") || other.contains("gate_inp") || other.contains("freqs") => {
                    "F32".into()
                }
                _ => name.to_uppercase(),
            };
            assert_eq!(ty.name(), name, "{}", tensor.name);
        }
    }
    // Every type has a recipe of the same name.
    for ty in TensorType::ALL {
        assert!(Recipe::named(ty.name()).is_some_and(|recipe| recipe.base() == *ty || ty.name() == "IQ2_S"), "{ty}");
    }
}

#[test]
fn choices_override_rules() {
    use TensorType::{F16, Q4_0, Q4_K, Q5_0, Q6_K, Q8_0};
    let tied = Sizes::new("arch=llama layers=4 heads=8 kv=2 embd=256 ff=256 tied=1");
    let untied = Sizes::new("arch=llama layers=4 heads=8 kv=2 embd=256 ff=256 tied=0");
    let types = |recipe: &str, sizes: &Sizes, choices: TypeChoices| {
        let tensors = sizes.tensors();
        let types = Recipe::named(recipe).unwrap().types(&sizes.metadata(), &tensors, &choices);
        let type_of = |name| types[tensors.iter().position(|t| t.name == name).unwrap()];
        (type_of("token_embd.weight"), if sizes.get("tied") == 1 { None } else { Some(type_of("output.weight")) })
    };
    let plain = TypeChoices::default();
    assert_eq!(types("q4_0", &tied, plain), (Q6_K, None));
    assert_eq!(types("q4_0", &untied, plain), (Q4_0, Some(Q6_K)));
    let both = TypeChoices { embedding: Some(F16), head: Some(Q5_0), ..plain };
    assert_eq!(types("q4_k_m", &tied, both), (F16, None));
    assert_eq!(types("q4_k_m", &untied, both), (F16, Some(Q5_0)));
    let head = TypeChoices { head: Some(Q8_0), pure: true, ..plain };
    assert_eq!(types("q4_k_m", &tied, head), (Q8_0, None));
    assert_eq!(types("q4_k_m", &untied, TypeChoices { pure: true, ..plain }), (Q4_K, Some(Q4_K)));
}

//! Cache groups: which layers keep the same positions, and how many KV elements the groups need.

use metal_attention_model::{CacheGroups, Capacity, KvSource, Mask, Mixer, ModelShape, ModelSpec, PAGE};

/// The capacity of one sequence of `n_ctx` positions.
fn capacity(n_ctx: usize) -> Capacity {
    Capacity { n_ctx, n_seq: 1, n_cache: None, n_windows: None, state_cache: 0, n_ubatch: 512 }
}

/// The spec of the named shape `name`, or of the small custom shape of architecture `name`.
fn spec(name: &str) -> ModelSpec {
    let shape = ModelShape::named(name).cloned().or_else(|| ModelShape::custom(name));
    ModelSpec::from_metadata(&shape.unwrap().metadata()).unwrap()
}

/// The layer whose KV cache layer `i` reads.
fn cache_of(spec: &ModelSpec, i: usize) -> usize {
    spec.layers[i].mixer.kv_cache_layer(i).unwrap()
}

#[test]
fn gemma_3_needs_hardly_more_memory_than_llama_cpp() {
    let spec = spec("gemma-3-4b");
    let (n_layer, n_full) = (34, 5);
    assert_eq!(spec.n_layer(), n_layer);
    let groups = CacheGroups::new(&spec, capacity(32_768));
    let full = (0..n_layer).filter(|&i| groups.of_layer(i) == 0).count();
    assert_eq!(full, n_full);
    // llama.cpp keeps a window and a micro-batch, padded to 256 positions.
    let padded = (1024_u64 + 512).next_multiple_of(256);
    let llama_cpp = (n_full as u64 * 32_768 + (n_layer - n_full) as u64 * padded) * 2 * 4 * 256;
    let ours = groups.n_elements(&spec);
    assert!(ours as f64 <= 1.1 * llama_cpp as f64, "{ours} elements, llama.cpp {llama_cpp}");
    // MiB of F16, and those of a cache in which all layers keep all positions.
    let mib = |elements: u64| (2 * elements) >> 20;
    assert_eq!((mib(ours), mib(32_768 * spec.kv_elements_per_token() as u64)), (821, 4352));
    // Each sequence has its own window.
    let four = CacheGroups::new(&spec, Capacity { n_seq: 4, ..capacity(32_768) });
    assert_eq!(four.n_elements(&spec), 4 * ours);
}

#[test]
fn windows_that_save_no_memory_have_no_group() {
    let spec = spec("gemma-3-4b");
    // 1024 + 512 positions may be spread over 25 pages.
    for (n_ctx, n_groups) in [(512, 1), (1024, 1), (25 * PAGE, 1), (25 * PAGE + 1, 2)] {
        let groups = CacheGroups::new(&spec, capacity(n_ctx));
        assert_eq!(groups.groups().len(), n_groups, "{n_ctx}");
        let n_positions = n_ctx.next_multiple_of(PAGE) as u64;
        let all = n_positions * spec.kv_elements_per_token() as u64;
        assert!(if n_groups == 1 { groups.n_elements(&spec) == all } else { groups.n_elements(&spec) < all });
    }
    // A window group has at most as many pages as all positions, however many sequences there are.
    let capacity = Capacity { n_seq: 100, n_cache: Some(32_768), ..capacity(32_768) };
    let groups = CacheGroups::new(&spec, capacity);
    assert_eq!((groups.groups().len(), groups.groups()[1].n_pages), (2, 32_768 / PAGE));
    // With `n_windows`, it has pages for that many windows.
    let fewer = CacheGroups::new(&spec, Capacity { n_windows: Some(3), ..capacity });
    assert_eq!(fewer.groups()[1].n_pages, 3 * 25);
    let capacity = Capacity { n_ubatch: usize::MAX, ..capacity };
    assert_eq!(CacheGroups::new(&spec, capacity).groups().len(), 1);
}

#[test]
fn layers_that_read_a_cache_are_in_its_group() {
    for name in ["gemma3n", "gemma4", "gpt-oss-20b", "llama4", "cohere2"] {
        let spec = spec(name);
        let groups = CacheGroups::new(&spec, capacity(131_072));
        assert_eq!(groups.groups().len(), 2, "{name}");
        for (i, layer) in spec.layers.iter().enumerate() {
            let Mixer::Attention(a) = &layer.mixer else { panic!("{name} has attention") };
            assert_eq!(groups.of_layer(i), groups.of_layer(cache_of(&spec, i)), "{name}: layer {i}");
            assert_eq!(groups.of_layer(i), usize::from(a.mask != Mask::Causal), "{name}: layer {i}");
        }
    }
}

#[test]
fn a_cache_that_is_read_with_two_masks_keeps_all_positions() {
    let mut spec = spec("gemma3n");
    let reader = (0..spec.n_layer()).rfind(|&i| cache_of(&spec, i) != i).unwrap();
    let owner = cache_of(&spec, reader);
    for (i, mask) in [(reader, Mask::Window(1024)), (owner, Mask::Causal)] {
        let Mixer::Attention(a) = &mut spec.layers[i].mixer else { panic!("attention") };
        a.mask = mask;
    }
    let groups = CacheGroups::new(&spec, capacity(131_072));
    assert_eq!((groups.of_layer(owner), groups.of_layer(reader)), (0, 0));
}

#[test]
fn sequences_without_causal_masks_keep_all_positions() {
    let groups = CacheGroups::new(&spec("gemma-embedding"), capacity(131_072));
    assert_eq!(groups.groups().len(), 1);
}

#[test]
fn layers_of_encoders_share_the_memory_of_one() {
    for name in ["bert", "modern-bert", "nomic-bert", "jina-bert-v2", "gemma-embedding", "llama-embed", "eurobert"] {
        let spec = spec(name);
        assert!(!spec.is_causal() && spec.n_layer() > 1, "{name}");
        let groups = CacheGroups::new(&spec, capacity(512));
        assert!(!groups.outlive_steps(), "{name}");
        assert!((0..spec.n_layer()).all(|i| groups.memory_of_layer(i) == Some(0)), "{name}");
        let all_layers = 512 * spec.kv_elements_per_token();
        assert_eq!(groups.n_elements(&spec), (all_layers / spec.n_layer()) as u64, "{name}");
    }
    for name in ["llama", "gemma3", "deepseek2"] {
        let spec = spec(name);
        let groups = CacheGroups::new(&spec, capacity(512));
        assert!(groups.outlive_steps(), "{name}");
        assert!((0..spec.n_layer()).all(|i| groups.memory_of_layer(i) == Some(i)), "{name}");
    }
}

#[test]
fn layers_of_encoders_with_other_shapes_have_other_memory() {
    let mut spec = spec("bert");
    spec.layers.resize(3, spec.layers[0].clone());
    let Mixer::Attention(a) = &mut spec.layers[1].mixer else { panic!("attention") };
    (a.n_head_kv, a.head_dim) = (a.n_head_kv / 2, 4 * a.head_dim);
    let groups = CacheGroups::new(&spec, capacity(512));
    assert_eq!([0, 1, 2].map(|i| groups.memory_of_layer(i)), [Some(0), Some(1), Some(0)]);
    // The second layer has twice the elements of the others.
    assert_eq!(groups.n_elements(&spec), 512 * spec.kv_elements_per_token() as u64 * 3 / 4);
    // A layer without attention has none.
    spec.layers[1].mixer = Mixer::None;
    let groups = CacheGroups::new(&spec, capacity(512));
    assert_eq!([0, 1, 2].map(|i| groups.memory_of_layer(i)), [Some(0), None, Some(0)]);
}

#[test]
fn encoders_whose_layers_read_those_of_others_share_no_memory() {
    let mut spec = spec("bert");
    spec.layers.resize(4, spec.layers[0].clone());
    let Mixer::Attention(a) = &mut spec.layers[2].mixer else { panic!("attention") };
    a.kv = KvSource::Layer(1);
    let groups = CacheGroups::new(&spec, capacity(512));
    assert_eq!([0, 1, 2, 3].map(|i| groups.memory_of_layer(i)), [Some(0), Some(1), Some(1), Some(3)]);
    assert_eq!(groups.n_elements(&spec), 512 * spec.kv_elements_per_token() as u64);
    assert!(!groups.outlive_steps());
}

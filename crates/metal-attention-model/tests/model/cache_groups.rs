//! Which positions the layers of a model keep, and what that takes.

use metal_attention_model::{CacheGroups, Capacity, Mask, Mixer, ModelShape, ModelSpec, PAGE};

fn room(n_ctx: usize) -> Capacity {
    Capacity { n_ctx, n_seq: 1, n_cache: None, n_windows: None, state_cache: 0, n_ubatch: 512 }
}

/// The shape `name`, or one of the custom size with the keys of an architecture.
fn spec(name: &str) -> ModelSpec {
    let shape = ModelShape::named(name).cloned().or_else(|| ModelShape::custom(name));
    ModelSpec::from_metadata(&shape.unwrap().metadata()).unwrap()
}

fn cache_of(spec: &ModelSpec, i: usize) -> usize {
    spec.layers[i].mixer.kv_cache_layer(i).unwrap()
}

#[test]
fn gemma_3_takes_hardly_more_than_llama_cpp() {
    let spec = spec("gemma-3-4b");
    let (n_layer, n_full) = (34, 5);
    assert_eq!(spec.n_layer(), n_layer);
    let groups = CacheGroups::new(&spec, room(32_768));
    let full = (0..n_layer).filter(|&i| groups.of_layer(i) == 0).count();
    assert_eq!(full, n_full);
    // There windows have room for what they see and a micro-batch, padded to 256 positions.
    let padded = (1024_u64 + 512).next_multiple_of(256);
    let theirs = (n_full as u64 * 32_768 + (n_layer - n_full) as u64 * padded) * 2 * 4 * 256;
    let ours = groups.n_elements(&spec);
    assert!(ours as f64 <= 1.1 * theirs as f64, "{ours} elements, llama.cpp {theirs}");
    // In MiB of F16, and what it would be if all layers kept everything.
    let mib = |elements: u64| (2 * elements) >> 20;
    assert_eq!((mib(ours), mib(32_768 * spec.kv_elements_per_token() as u64)), (821, 4352));
    // Several sequences, each with its window.
    let four = CacheGroups::new(&spec, Capacity { n_seq: 4, ..room(32_768) });
    assert_eq!(four.n_elements(&spec), 4 * ours);
}

#[test]
fn windows_that_save_nothing_are_none() {
    let spec = spec("gemma-3-4b");
    // 1024 + 512 positions may lie in 25 pages.
    for (n_ctx, n_groups) in [(512, 1), (1024, 1), (25 * PAGE, 1), (25 * PAGE + 1, 2)] {
        let groups = CacheGroups::new(&spec, room(n_ctx));
        assert_eq!(groups.groups().len(), n_groups, "{n_ctx}");
        let n_positions = n_ctx.next_multiple_of(PAGE) as u64;
        let all = n_positions * spec.kv_elements_per_token() as u64;
        assert!(if n_groups == 1 { groups.n_elements(&spec) == all } else { groups.n_elements(&spec) < all });
    }
    // No more than all positions take, however many sequences share these.
    let room = Capacity { n_seq: 100, n_cache: Some(32_768), ..room(32_768) };
    let groups = CacheGroups::new(&spec, room);
    assert_eq!((groups.groups().len(), groups.groups()[1].n_pages), (2, 32_768 / PAGE));
    // Or for fewer windows than there are sequences.
    let fewer = CacheGroups::new(&spec, Capacity { n_windows: Some(3), ..room });
    assert_eq!(fewer.groups()[1].n_pages, 3 * 25);
    let room = Capacity { n_ubatch: usize::MAX, ..room };
    assert_eq!(CacheGroups::new(&spec, room).groups().len(), 1);
}

#[test]
fn layers_that_read_a_cache_are_in_its_group() {
    for name in ["gemma3n", "gemma4", "gpt-oss-20b", "llama4", "cohere2"] {
        let spec = spec(name);
        let groups = CacheGroups::new(&spec, room(131_072));
        assert_eq!(groups.groups().len(), 2, "{name}");
        for (i, layer) in spec.layers.iter().enumerate() {
            let Mixer::Attention(a) = &layer.mixer else { panic!("{name} has attention") };
            assert_eq!(groups.of_layer(i), groups.of_layer(cache_of(&spec, i)), "{name}: layer {i}");
            assert_eq!(groups.of_layer(i), usize::from(a.mask != Mask::Causal), "{name}: layer {i}");
        }
    }
}

#[test]
fn a_cache_that_is_seen_in_two_ways_is_whole() {
    let mut spec = spec("gemma3n");
    let reader = (0..spec.n_layer()).rfind(|&i| cache_of(&spec, i) != i).unwrap();
    let owner = cache_of(&spec, reader);
    for (i, mask) in [(reader, Mask::Window(1024)), (owner, Mask::Causal)] {
        let Mixer::Attention(a) = &mut spec.layers[i].mixer else { panic!("attention") };
        a.mask = mask;
    }
    let groups = CacheGroups::new(&spec, room(131_072));
    assert_eq!((groups.of_layer(owner), groups.of_layer(reader)), (0, 0));
}

#[test]
fn texts_that_are_evaluated_whole_are_kept_whole() {
    let groups = CacheGroups::new(&spec("gemma-embedding"), room(131_072));
    assert_eq!(groups.groups().len(), 1);
}

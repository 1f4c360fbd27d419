//! Block drafters (DFlash, DFlash-2, DSpark): their drafts and logits are llama.cpp's on each backend, also of several sequences at once,
//! with prompts in other chunks, and after drafts were taken or refused.

use std::cell::RefCell;

use metal_attention::gguf::TensorDecl;
use metal_attention::speculation::{DraftFile, DraftRequest};
use metal_attention::{BatchToken, Device, Error, Model, ModelOptions};
use metal_attention_model::ModelError;

use crate::drafters::{
    Drafted, Pair, cases, changed, check, check_case, drafter, fresh, gguf, options, request, target,
};

#[test]
fn block_drafters_give_llama_cpps_drafts_on_the_cpu() {
    check("dflash", Pair::on_the_cpu);
}

#[cfg(feature = "wgpu")]
#[test]
fn block_drafters_give_llama_cpps_drafts_through_wgpu() {
    crate::drafters::check_through_wgpu("dflash");
}

#[cfg(feature = "cuda")]
#[test]
fn block_drafters_give_llama_cpps_drafts_through_cuda() {
    crate::drafters::check_through_cuda("dflash");
}

/// The target takes some drafts and refuses others. Only what held becomes context, so that the next drafts are those of a drafter
/// that has read the sequence at once, bit for bit.
#[test]
fn drafts_after_verified_ones_are_those_of_the_whole_sequence() {
    for (name, cases) in cases("dflash") {
        let (model, draft) = (target(&cases[0].target), drafter(&name));
        let mut pair = Pair::on_the_cpu(&model, &draft);
        let mut ids = cases[1].tokens.clone();
        pair.evaluate_from(1, 0, &ids, 7);
        for n_taken in [1, 0, 3, 2] {
            let (drafts, logits) = pair.propose_one(1, &ids, 3);
            let want = fresh(&model, &draft, &ids);
            assert_eq!(drafts, want.0, "{name}, {} tokens", ids.len());
            assert!(logits == want.1, "{name}, {} tokens: other logits", ids.len());
            let first = ids.len() - 1;
            let verified: Vec<_> = ids[first..].iter().chain(&drafts[0]).copied().collect();
            let token = |(i, &id)| BatchToken { id, seq: 1, pos: first + i, output: true };
            let tokens: Vec<_> = verified.iter().enumerate().map(token).collect();
            pair.evaluate(&tokens, usize::MAX);
            ids.extend_from_slice(&drafts[0][..n_taken]);
            ids.push((drafts[0].get(n_taken).copied().unwrap_or(5) + 1) % 300);
            assert_eq!(pair.target.rewind(1, ids.len() - 1), ids.len() - 1);
        }
    }
}

/// A sequence that is cut back, replaced, or only partly observed still gets drafts, and others are not disturbed.
#[test]
fn sequences_may_be_cut_back_replaced_or_observed_in_part() {
    let (all, name) = (cases("dflash"), "dflash-drafter.gguf");
    let (cases, draft) = (&all[name], drafter(name));
    let model = target(&cases[0].target);
    let mut pair = Pair::on_the_cpu(&model, &draft);
    let (short, long) = (&cases[0], &cases[2]);
    pair.evaluate_from(0, 0, &long.tokens, 9);
    pair.evaluate_from(2, 0, &short.tokens, 9);
    let (drafts, logits) = pair.propose(&[request(0, long)]);
    check_case(long, &drafts[0], &logits[0]);
    // Cut back without a word, and continued otherwise.
    let cut: Vec<u32> = long.tokens[..12].iter().copied().chain([7, 9, 250]).collect();
    assert_eq!(pair.target.rewind(0, 12), 12);
    pair.evaluate_from(0, 12, &cut, 9);
    let (drafts, logits) =
        pair.propose(&[DraftRequest { seq: 0, ids: &cut, prediction: &[], n: 3 }, request(2, short)]);
    let want = fresh(&model, &draft, &cut);
    assert!((&drafts[0], &logits[0]) == (&want.0[0], &want.1[0]), "{drafts:?} for {:?}", want.0);
    check_case(short, &drafts[1], &logits[1]);
    // The first part was evaluated elsewhere: the drafter reads from there on.
    pair.drafter.forget(1);
    let shared = pair.target.share_prefix(0, 1, 10).unwrap();
    let ids = [&cut[..shared], &[3, 5, 8, 13]].concat();
    assert_eq!(pair.propose_one(1, &ids, 3).0, [Vec::<u32>::new()]);
    pair.evaluate_from(1, shared, &ids, 9);
    assert_eq!(pair.propose_one(1, &ids, 3).0[0].len(), 3);
    // Hidden rows of the last tokens are not known: no drafts, and no error.
    let unseen = [&ids[..], &[4, 4]].concat();
    assert_eq!(pair.propose_one(1, &unseen, 3).0, [Vec::<u32>::new()]);
    // A sequence of one token has no context, and a block all the same.
    pair.target.rewind(1, 0);
    assert_eq!(pair.propose_one(1, &[7], 3).0[0].len(), 3);
    // No more drafts than the file's blocks have places, of 8 tokens.
    pair.evaluate_from(1, 0, &cut, 9);
    assert_eq!(pair.propose_one(1, &cut, 64).0[0].len(), 7);
    // Not beyond the context, of 128 tokens.
    let filled: Vec<u32> = (0..126).map(|i| i * 7 % 300).collect();
    pair.target.rewind(1, 0);
    pair.evaluate_from(1, 0, &filled, 50);
    assert_eq!(pair.propose_one(1, &filled, 7).0[0].len(), 2);
}

/// The drafts that follow a prompt.
fn drafts_of(draft: &DraftFile) -> Drafted {
    fresh(&target("dflash.gguf"), draft, &cases("dflash")["dflash-drafter.gguf"][2].tokens)
}

#[test]
fn options_of_block_drafters_change_their_drafts() {
    let plain = "dflash-drafter.gguf";
    let (_, want) = drafts_of(&drafter(plain));
    let with = |set: &dyn Fn(&mut metal_attention::gguf::Metadata)| {
        drafts_of(&changed(plain, |metadata, _| set(metadata)).unwrap()).1
    };
    // Windows of all layers or of one, longer and shorter than a block of 4; one that holds the whole text changes nothing.
    let window = |window: u32, pattern: Option<Vec<bool>>| {
        with(&move |metadata| {
            metadata.set("dflash.attention.sliding_window", window);
            if let Some(pattern) = &pattern {
                metadata.set("dflash.attention.sliding_window_pattern", pattern.clone());
            }
        })
    };
    assert_eq!(window(64, None), want);
    let both = [window(8, None), window(3, None), window(2, None)];
    let one = window(8, Some(vec![true, false]));
    let other = window(8, Some(vec![false, true]));
    let all = [&want, &both[0], &both[1], &both[2], &one, &other];
    for (i, a) in all.iter().enumerate() {
        assert!(all[..i].iter().all(|b| a != b), "{i}");
    }
    assert_eq!(window(8, Some(vec![false, false])), want);
    // Layers of the target in another order, another mask token, another rotation.
    let layers = |layers: Vec<u32>| with(&move |metadata| metadata.set("dflash.target_layers", layers.clone()));
    assert_ne!(layers(vec![3, 1, 4]), want);
    assert_ne!(layers(vec![1, 3, 5]), want);
    assert_ne!(with(&|metadata| metadata.set("tokenizer.ggml.mask_token_id", 5_u32)), want);
    assert_ne!(with(&|metadata| metadata.set("dflash.rope.freq_base", 5000.0_f32)), want);
    assert_eq!(with(&|metadata| metadata.set("dflash.block_size", 4_u32)), want, "3 drafts are a block of 4");
    // The candidates of a selector, and no selector.
    let selected = drafts_of(&drafter("dflash-2-drafter.gguf")).0;
    let of_one = changed("dflash-2-drafter.gguf", |metadata, _| metadata.set("dflash.selector_top_k", 1_u32)).unwrap();
    let (drafts, logits) = drafts_of(&of_one);
    let likeliest = |row: &Vec<f32>| (0..320).max_by(|&a, &b| row[a as usize].total_cmp(&row[b as usize])).unwrap();
    assert_eq!(drafts[0], logits[0].iter().map(likeliest).collect::<Vec<u32>>());
    assert_ne!(drafts, selected);
}

#[test]
fn block_drafters_of_other_targets_and_damaged_ones_are_refused() {
    let (model, options) = (target("dflash.gguf"), options(Device::Cpu));
    let pass = RefCell::new(model.backend(&options).unwrap());
    let refused = |draft: Result<DraftFile, Error>| match draft.unwrap().drafter(
        &model,
        &mut **pass.borrow_mut(),
        &options,
        None,
    ) {
        Err(Error::Model(error)) => error,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it is not refused"),
    };
    let with =
        |key: &str, value: u32| refused(changed("dflash-2-drafter.gguf", |metadata, _| metadata.set(key, value)));
    assert!(matches!(with("dflash.embedding_length", 64), ModelError::OtherTarget { .. }));
    for (key, value) in [
        ("dflash.block_size", 1),
        ("dflash.expert_count", 4),
        ("dflash.conv_group_size", 5),
        ("dflash.conv_kernel_size", 99),
        ("dflash.selector_top_k", 321),
        ("tokenizer.ggml.mask_token_id", 320),
    ] {
        let error = with(key, value).to_string();
        assert!(error.starts_with(key), "{error}");
    }
    let layers = |layers: Vec<u32>| {
        refused(changed("dflash-drafter.gguf", |metadata, _| metadata.set("dflash.target_layers", layers)))
    };
    assert!(matches!(layers(vec![1, 3, 6]), ModelError::OtherTarget { .. }));
    assert!(matches!(layers(vec![]), ModelError::InvalidValue { .. }));
    assert!(matches!(layers(vec![1, 3]), ModelError::TensorShape { .. }), "fc has another width");
    for key in ["tokenizer.ggml.mask_token_id", "dflash.target_layers", "dflash.block_size"] {
        let error = refused(changed("dflash-drafter.gguf", |metadata, _| {
            metadata.remove(key);
        }));
        assert!(matches!(&error, ModelError::MissingKey { key: missing } if missing == key), "{error}");
    }
    for name in ["fc.weight", "selector_successor.weight", "blk.1.ffn_conv_base", "blk.0.attn_conv_proj.weight"] {
        let error = refused(changed("dflash-2-drafter.gguf", |_, tensors| tensors.retain(|(of, _)| of.name != name)));
        assert!(matches!(&error, ModelError::MissingTensor { name: missing, .. } if missing == name), "{error}");
    }
    let unknown = refused(changed("dspark-drafter.gguf", |_, tensors| {
        let (decl, bytes) = tensors[0].clone();
        tensors.push((TensorDecl { name: "confidence.weight".into(), ..decl }, bytes));
    }));
    assert!(matches!(&unknown, ModelError::UnknownTensor { name } if name == "confidence.weight"), "{unknown}");
    let error = Model::from_gguf(gguf("dflash-drafter.gguf"), &ModelOptions::default()).unwrap_err().to_string();
    assert!(error.contains("--model-draft"), "{error}");
}

//! Tests of default values, ranges, and names.

use super::*;
use crate::sampling::{NumberOption, SamplerKind, SamplingError};

#[test]
fn the_defaults_are_those_of_llama_cpp() {
    let options = SamplerOptions::default();
    assert_eq!((options.temperature, options.dynatemp_range, options.dynatemp_exponent), (0.8, 0.0, 1.0));
    assert_eq!((options.top_k, options.top_p, options.min_p), (40, 0.95, 0.05));
    assert_eq!((options.typical_p, options.top_n_sigma), (1.0, -1.0));
    assert_eq!((options.xtc_probability, options.xtc_threshold), (0.0, 0.1));
    assert_eq!((options.penalty_last_n, options.repeat_penalty), (64, 1.0));
    assert_eq!((options.frequency_penalty, options.presence_penalty), (0.0, 0.0));
    assert_eq!((options.dry_multiplier, options.dry_base), (0.0, 1.75));
    assert_eq!((options.dry_allowed_length, options.dry_penalty_last_n), (2, 64));
    let order: Vec<&str> = options.order.iter().map(|kind| kind.name()).collect();
    assert_eq!(order.join(";"), "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature");
}

#[test]
fn options_out_of_range_are_named() {
    type Set = fn(&mut SamplerOptions, f32);
    let cases: [(&str, Set, &[f32]); 14] = [
        ("temperature", |o, v| o.temperature = v, &[-0.1, f32::INFINITY]),
        ("dynatemp_range", |o, v| o.dynatemp_range = v, &[-0.1, f32::INFINITY]),
        ("dynatemp_exponent", |o, v| o.dynatemp_exponent = v, &[-0.1, f32::INFINITY]),
        ("top_p", |o, v| o.top_p = v, &[-0.1, 1.1]),
        ("min_p", |o, v| o.min_p = v, &[-0.1, 1.1]),
        ("typical_p", |o, v| o.typical_p = v, &[-0.1, 1.1]),
        ("top_n_sigma", |o, v| o.top_n_sigma = v, &[f32::INFINITY]),
        ("xtc_probability", |o, v| o.xtc_probability = v, &[-0.1, 1.1]),
        ("xtc_threshold", |o, v| o.xtc_threshold = v, &[-0.1, 1.1]),
        ("repeat_penalty", |o, v| o.repeat_penalty = v, &[-1.0, 0.0, f32::INFINITY]),
        ("frequency_penalty", |o, v| o.frequency_penalty = v, &[f32::NEG_INFINITY]),
        ("presence_penalty", |o, v| o.presence_penalty = v, &[f32::INFINITY]),
        ("dry_multiplier", |o, v| o.dry_multiplier = v, &[-1.0, f32::INFINITY]),
        ("dry_base", |o, v| o.dry_base = v, &[-1.0, f32::INFINITY]),
    ];
    for (name, set, bad) in cases {
        for &value in bad.iter().chain(&[f32::NAN]) {
            let mut options = SamplerOptions::default();
            set(&mut options, value);
            match Sampler::new(options) {
                Err(SamplingError::OutOfRange { option, .. }) => assert_eq!(option, name),
                other => panic!("{name} = {value}: {other:?}"),
            }
        }
    }
    let error = Sampler::new(SamplerOptions { top_p: 1.5, ..SamplerOptions::default() }).unwrap_err();
    assert_eq!(error.to_string(), "sampling option top_p is 1.5, but it must be from 0 to 1 (off)");
}

#[test]
fn a_bias_is_finite_or_forbids() {
    for bias in [f32::NAN, f32::INFINITY] {
        let options = SamplerOptions { logit_bias: vec![(3, 1.0), (7, bias)], ..SamplerOptions::default() };
        assert!(matches!(Sampler::new(options), Err(SamplingError::LogitBias { id: 7, .. })));
    }
}

#[test]
fn every_name_is_read_back() {
    for kind in SamplerKind::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
        assert_eq!(kind.to_string().replace('_', "-").parse(), Ok(kind));
        assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
    }
    for (text, kind) in [
        ("temp", SamplerKind::Temperature),
        ("nucleus", SamplerKind::TopP),
        ("typ", SamplerKind::TypicalP),
        ("typical", SamplerKind::TypicalP),
        ("typical-p", SamplerKind::TypicalP),
        ("topp", SamplerKind::TopP),
        ("Top-N-Sigma", SamplerKind::TopNSigma),
    ] {
        assert_eq!(text.parse(), Ok(kind));
    }
}

#[test]
fn an_order_is_names_separated_by_semicolons() {
    let order = SamplerKind::parse_order("penalties;top_k;typ_p;top_p;min_p;temperature").unwrap();
    let names: Vec<&str> = order.iter().map(|kind| kind.name()).collect();
    assert_eq!(names, ["penalties", "top_k", "typ_p", "top_p", "min_p", "temperature"]);
    assert_eq!(SamplerKind::parse_order(" top_k ; ;temperature;").unwrap().len(), 2);
    assert_eq!(SamplerKind::parse_order(""), Ok(vec![]));
    let error = SamplerKind::parse_order("top_k;topq").unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no sampler named \"topq\"; use \
         penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature"
    );
}

#[test]
fn letters_are_those_of_llama_cpp() {
    let order = SamplerKind::parse_letters("edskypmxt");
    assert_eq!(order.as_deref(), Some(&SamplerKind::ALL[..]));
    assert_eq!(SamplerKind::parse_letters("kt"), Some(vec![SamplerKind::TopK, SamplerKind::Temperature]));
    assert_eq!((SamplerKind::parse_letters("kq"), SamplerKind::parse_letters("")), (None, Some(vec![])));
}

#[test]
fn numbers_are_found_by_name_and_kept_to_their_ranges() {
    let set = |name: &str, value: f64| {
        let mut options = SamplerOptions::default();
        NumberOption::find(name).unwrap().set(&mut options, value).map(|()| options)
    };
    assert_eq!(set("repeat_last_n", -1.0).unwrap().penalty_last_n, usize::MAX);
    assert_eq!(set("repetition_penalty", 1.5).unwrap().repeat_penalty, 1.5);
    assert_eq!((set("top_k", -1.0).unwrap().top_k, set("top_k", 7.0).unwrap().top_k), (0, 7));
    assert_eq!(set("temp", 2.5).unwrap().temperature, 2.5);
    for (name, value) in [("top_k", 1.5), ("min_keep", -1.0), ("top_p", 1.5), ("temp", 1e300), ("top_k", f64::NAN)] {
        assert!(matches!(set(name, value), Err(SamplingError::OutOfRange { .. })), "{name} {value}");
    }
    assert!(NumberOption::find("mirostat").is_none());
    // No name belongs to two options, and each default is within its range.
    let mut names: Vec<&str> =
        NumberOption::ALL.iter().flat_map(|o| o.aliases.iter().copied().chain([o.name])).collect();
    let n = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), n);
    for option in NumberOption::ALL {
        let default = option.get(&SamplerOptions::default());
        assert!(option.minimum().is_none_or(|least| default >= least), "{}", option.name);
        assert!(option.maximum().is_none_or(|most| default <= most), "{}", option.name);
    }
}

#[test]
fn greedy_is_known_as_such() {
    let is_greedy = |options| sampler(options).is_greedy();
    assert!(is_greedy(SamplerOptions::greedy()));
    assert!(!is_greedy(SamplerOptions::default()));
    assert!(!is_greedy(SamplerOptions { presence_penalty: 0.1, ..SamplerOptions::greedy() }));
    assert!(!is_greedy(SamplerOptions { dry_multiplier: 0.1, ..SamplerOptions::greedy() }));
    assert!(!is_greedy(SamplerOptions { logit_bias: vec![(0, 1.0)], ..SamplerOptions::greedy() }));
    // Penalties without a window, or left out of the order, do nothing.
    assert!(is_greedy(SamplerOptions { presence_penalty: 0.1, penalty_last_n: 0, ..SamplerOptions::greedy() }));
    assert!(is_greedy(SamplerOptions { presence_penalty: 0.1, order: vec![], ..SamplerOptions::greedy() }));
}

#[test]
fn options_are_written_as_json() {
    let json = serde_json::to_value(SamplerOptions { seed: Some(9), ..SamplerOptions::default() }).unwrap();
    assert_eq!(json["top_k"], 40);
    assert_eq!(json["seed"], 9);
    assert_eq!(json["order"][4], "typ_p");
}

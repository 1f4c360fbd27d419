//! The block formats against gguf-py: see `make_blocks.py`.

mod support;

use metal_attention_gguf::{GgufFile, TensorType, blocks};

#[test]
fn dequantises_as_gguf_py_does_bit_for_bit() {
    let file = GgufFile::open(support::repository("tests/data/gguf/blocks.gguf")).unwrap();
    for ty in TensorType::ALL {
        let tensor = file.tensor(ty.name()).unwrap();
        assert_eq!(tensor.ty(), *ty);
        let expected = file.tensor(&format!("{ty}.values")).unwrap();
        let expected: Vec<u32> = expected.as_f32().unwrap().iter().map(|x| x.to_bits()).collect();
        let found: Vec<u32> = tensor.to_f32().iter().map(|x| x.to_bits()).collect();
        assert_eq!(found, expected, "{ty}");

        // The same from bytes that are aligned to nothing.
        let shifted = [&[0], tensor.bytes()].concat();
        let mut values = vec![0.0; tensor.n_elements()];
        ty.dequantize(&shifted[1..], &mut values);
        assert_eq!(values.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), expected, "{ty} unaligned");
    }
}

#[test]
fn quantises_as_gguf_py_does_byte_for_byte() {
    let file = GgufFile::open(support::repository("tests/data/gguf/blocks.gguf")).unwrap();
    let mut compared = 0;
    for ty in TensorType::ALL {
        let Some(source) = file.tensor(&format!("{ty}.source")) else { continue };
        let mut found = Vec::new();
        ty.quantize(source.as_f32().unwrap(), &mut found).unwrap();
        assert_eq!(found, file.tensor(&format!("{ty}.quantized")).unwrap().bytes(), "{ty}");
        compared += 1;
    }
    assert_eq!(compared, 7);
}

/// 8192 numbers that look like weights: a bell curve from sums of a linear congruential generator.
fn weights() -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..8192).map(|_| (0..6).map(|_| uniform()).sum::<f32>() * 0.05).collect()
}

#[test]
fn quantisation_keeps_the_error_that_its_bits_allow() {
    // Root mean square error relative to the values', for the quantiser to stay below.
    let limits = [0.0, 3e-4, 2e-3, 0.085, 0.08, 0.043, 0.039, 0.0055, 0.28, 0.155, 0.072, 0.037, 0.018, 0.078, 0.079];
    let x = weights();
    for (ty, limit) in TensorType::ALL.iter().zip(limits) {
        let mut blocks = Vec::new();
        ty.quantize(&x, &mut blocks).unwrap();
        assert_eq!(blocks.len(), ty.row_bytes(x.len()));
        let mut y = vec![0.0; x.len()];
        ty.dequantize(&blocks, &mut y);
        let square = |x: f32| f64::from(x).powi(2);
        let error: f64 = x.iter().zip(&y).map(|(x, y)| square(x - y)).sum();
        let error = (error / x.iter().map(|&x| square(x)).sum::<f64>()).sqrt();
        assert!(error <= limit, "{ty}: {error}");

        // A second round changes almost nothing: what a type can hold, it holds.
        blocks.clear();
        ty.quantize(&y, &mut blocks).unwrap();
        let mut z = vec![0.0; x.len()];
        ty.dequantize(&blocks, &mut z);
        let drift: f64 = y.iter().zip(&z).map(|(y, z)| square(y - z)).sum();
        let drift = (drift / x.iter().map(|&x| square(x)).sum::<f64>()).sqrt();
        assert!(drift <= 0.03 * limit, "{ty}: drift {drift}");
    }
}

#[test]
fn zeros_and_constants_and_extremes_stay_finite() {
    let tiny = [1e-30f32; 256];
    let large = std::array::from_fn::<f32, 256, _>(|i| if i % 3 == 0 { 30000.0 } else { -1e-6 });
    let alone = std::array::from_fn::<f32, 256, _>(|i| if i == 77 { -3.0 } else { 0.0 });
    for &ty in TensorType::ALL {
        for (name, x) in
            [("zeros", [0.0; 256]), ("ones", [1.0; 256]), ("tiny", tiny), ("large", large), ("alone", alone)]
        {
            let mut blocks = Vec::new();
            ty.quantize(&x, &mut blocks).unwrap();
            let mut y = [f32::NAN; 256];
            ty.dequantize(&blocks, &mut y);
            let largest = x.iter().fold(0f32, |m, x| m.max(x.abs()));
            for (x, y) in x.iter().zip(y) {
                assert!((x - y).abs() <= largest * 0.15 + 1e-6, "{ty} {name}: {x} became {y}");
            }
        }
    }
}

#[test]
fn type_table_is_consistent() {
    for (i, &ty) in TensorType::ALL.iter().enumerate() {
        assert_eq!(TensorType::from_id(ty.id()), Some(ty));
        assert_eq!(ty.name().to_lowercase().parse::<TensorType>().unwrap(), ty);
        assert_eq!(ty.to_string().parse::<TensorType>().unwrap(), ty);
        assert!(TensorType::ALL[..i].iter().all(|other| other.id() != ty.id()));
    }
    let bits: Vec<f32> = TensorType::ALL.iter().map(|ty| ty.bits_per_weight()).collect();
    assert_eq!(bits, [32.0, 16.0, 16.0, 4.5, 5.0, 5.5, 6.0, 8.5, 2.625, 3.4375, 4.5, 5.5, 6.5625, 4.5, 4.25]);
    let error = "q9".parse::<TensorType>().unwrap_err().to_string();
    assert!(error.contains("`q9`") && error.contains("Q4_K, Q5_K"), "{error}");
    let error = TensorType::Q4_0.quantize(&[0.0; 33], &mut Vec::new()).unwrap_err().to_string();
    assert_eq!(error, "cannot quantise 33 values to Q4_0: it needs a multiple of 32");
}

#[test]
#[should_panic(expected = "do not hold")]
fn dequantise_refuses_lengths_that_differ() {
    TensorType::Q8_0.dequantize(&[0; 34], &mut [0.0; 64]);
}

#[test]
fn blocks_are_views_of_the_bytes() {
    let mut bytes = Vec::new();
    TensorType::Q8_0.quantize(&[1.0; 64], &mut bytes).unwrap();
    let blocks: &[blocks::BlockQ8_0] = blocks::cast(&bytes);
    assert_eq!(blocks.len(), 2);
    assert_eq!(blocks[1].qs, [127; 32]);
    assert_eq!(blocks[1].d.to_f32(), half::f16::from_f32(1.0 / 127.0).to_f32());
}

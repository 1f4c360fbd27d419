//! Quantisation and dequantisation of every tensor type against gguf-py. `make_blocks.py` writes the expected values.

use metal_attention_gguf::{GgufFile, TensorType, blocks};

/// The file that `make_blocks.py` writes.
fn expected_values() -> GgufFile {
    GgufFile::from_bytes(&metal_attention_testing::unpacked("tests/data/gguf/blocks.gguf")).unwrap()
}

#[test]
fn dequantises_like_gguf_py_bit_for_bit() {
    let file = expected_values();
    for ty in TensorType::ALL {
        if matches!(ty, TensorType::Q1_0 | TensorType::Q2_0) {
            continue; // gguf-py does not have these; SUMS covers them
        }
        let tensor = file.tensor(ty.name()).unwrap();
        assert_eq!(tensor.ty(), *ty);
        let expected = file.tensor(&format!("{ty}.values")).unwrap();
        let expected: Vec<u32> = expected.as_f32().unwrap().iter().map(|x| x.to_bits()).collect();
        let found: Vec<u32> = tensor.to_f32().iter().map(|x| x.to_bits()).collect();
        assert_eq!(found, expected, "{ty}");

        // The same bytes without alignment.
        let shifted = [&[0], tensor.bytes()].concat();
        let mut values = vec![0.0; tensor.n_elements()];
        ty.dequantize(&shifted[1..], &mut values);
        assert_eq!(values.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), expected, "{ty} unaligned");
    }
}

/// The checksums that `make_blocks.py` prints: for each type the sum of (2 i + 1) bits(x[i]) modulo 2^64.
const SUMS: [(TensorType, u64); 25] = [
    (TensorType::Q4_0, 0x8e1b727f837bac00),
    (TensorType::Q4_1, 0x3d5cf081e9a5ab16),
    (TensorType::Q5_0, 0x58010abce2d69600),
    (TensorType::Q5_1, 0x48cd4cf07557b704),
    (TensorType::Q8_0, 0x253d33f53bbd3b40),
    (TensorType::Q2_K, 0x94521430beed2ac3),
    (TensorType::Q3_K, 0x572406610ba8a4c0),
    (TensorType::Q4_K, 0x9cd7401c13ec4e43),
    (TensorType::Q5_K, 0xa668c4260f03f6cd),
    (TensorType::Q6_K, 0x667bbb044605468e),
    (TensorType::IQ4_NL, 0x9762428964e68d00),
    (TensorType::IQ4_XS, 0x2b725e34001f254a),
    (TensorType::IQ3_S, 0x33869cff4578d1a0),
    (TensorType::IQ3_XXS, 0x43c0c2b1adccf728),
    (TensorType::IQ2_S, 0x594197dd1bca81c4),
    (TensorType::IQ2_XS, 0x1d1191e7e1b6b0e8),
    (TensorType::IQ2_XXS, 0x87f11d841b7356b4),
    (TensorType::IQ1_M, 0xbf2b644580ac34e0),
    (TensorType::IQ1_S, 0x062f4bf33338b1e0),
    (TensorType::MXFP4, 0x8df5c5c3ef600000),
    (TensorType::NVFP4, 0xdb08576b6b700000),
    (TensorType::TQ2_0, 0x64b726bc9dc62000),
    (TensorType::TQ1_0, 0x6fcb061c286b2000),
    (TensorType::Q2_0, 0xb8dab570f599c000),
    (TensorType::Q1_0, 0x6817d33600000000),
];

#[test]
fn every_code_and_every_scale_is_dequantised_like_gguf_py() {
    const BLOCKS: usize = 65_536;
    for &ty in TensorType::ALL.iter().filter(|ty| ty.block_len() > 1) {
        let (_, expected) = SUMS.iter().find(|(other, _)| *other == ty).unwrap();
        let scales: &[usize] = match ty {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 | TensorType::I64 => unreachable!("it has no scales"),
            TensorType::Q4_0
            | TensorType::Q5_0
            | TensorType::Q8_0
            | TensorType::IQ4_NL
            | TensorType::IQ4_XS
            | TensorType::IQ3_S
            | TensorType::IQ3_XXS
            | TensorType::IQ2_S
            | TensorType::IQ2_XS
            | TensorType::IQ2_XXS
            | TensorType::IQ1_S
            | TensorType::Q2_0
            | TensorType::Q1_0 => &[0],
            TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4_K | TensorType::Q5_K => &[0, 2],
            TensorType::Q2_K => &[80, 82],
            TensorType::Q3_K => &[108],
            TensorType::Q6_K => &[208],
            TensorType::TQ2_0 => &[64],
            TensorType::TQ1_0 => &[52],
            TensorType::IQ1_M | TensorType::MXFP4 | TensorType::NVFP4 => &[],
        };
        let mut blocks = split_mix_64(20_261_122, BLOCKS * ty.block_bytes());
        for (i, block) in blocks.chunks_exact_mut(ty.block_bytes()).enumerate() {
            // Each 16-bit float once; infinities and NaN are replaced with subnormals.
            let half = |k: usize| {
                let h = (i * (2 * k + 1) % BLOCKS) as u16;
                if h & 0x7c00 == 0x7c00 { h & 0x83ff } else { h }
            };
            for (k, &at) in scales.iter().enumerate() {
                block[at..at + 2].copy_from_slice(&half(k).to_le_bytes());
            }
            if ty == TensorType::IQ1_M {
                for (k, scales) in block[48..].chunks_exact_mut(2).enumerate() {
                    scales[1] = scales[1] & 15 | ((half(0) >> (4 * k)) as u8 & 15) << 4;
                }
            }
        }
        let mut values = vec![0.0; BLOCKS * ty.block_len()];
        ty.dequantize(&blocks, &mut values);
        let weigh = |(i, x): (u64, &f32)| (2 * i + 1).wrapping_mul(u64::from(x.to_bits()));
        let sum = (0..).zip(&values).map(weigh).fold(0u64, u64::wrapping_add);
        assert_eq!(sum, *expected, "{ty}");
    }
}

/// `n` bytes of `SplitMix64`. `n` is a multiple of eight.
fn split_mix_64(seed: u64, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    for (i, bytes) in (1..).zip(bytes.as_chunks_mut::<8>().0) {
        let z = seed.wrapping_add(u64::wrapping_mul(i, 0x9e37_79b9_7f4a_7c15));
        let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        *bytes = (z ^ z >> 31).to_le_bytes();
    }
    bytes
}

#[test]
fn random_blocks_stay_within_the_requested_size() {
    for &ty in TensorType::ALL {
        let mut values = vec![0.0f32; 256 * 64];
        ty.dequantize(&blocks::random_blocks(ty, values.len(), 7, 3.0), &mut values);
        let largest = values.iter().fold(0f32, |m, x| m.max(x.abs()));
        assert!((0.7..=3.3).contains(&largest), "{ty}: {largest}");
    }
}

#[test]
fn quantises_like_gguf_py_byte_for_byte() {
    let file = expected_values();
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

/// 8192 values distributed like weights, nearly normal: sums of a linear congruential generator's numbers.
fn weights() -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..8192).map(|_| (0..6).map(|_| uniform()).sum::<f32>() * 0.05).collect()
}

#[test]
fn quantisation_error_is_within_the_limit_of_its_bits() {
    // Limits of the root mean square error relative to that of the values.
    let limits =
        [0.0, 3e-4, 2e-3, 0.085, 0.08, 0.043, 0.039, 0.0055, 0.265, 0.152, 0.069, 0.0345, 0.0178, 0.077, 0.0765];
    // Limits for the codebook types, 4-bit floats, and types of one and two bits.
    let more = [0.152, 0.203, 0.265, 0.32, 0.38, 0.51, 0.555, 0.113, 0.089, 0.79, 0.79, 0.71, 0.6];
    let x = weights();
    assert_eq!(limits.len() + more.len(), TensorType::ALL.len());
    for (ty, limit) in TensorType::ALL.iter().zip(limits.into_iter().chain(more)) {
        let mut blocks = Vec::new();
        ty.quantize(&x, &mut blocks).unwrap();
        assert_eq!(blocks.len(), ty.row_bytes(x.len()));
        let mut y = vec![0.0; x.len()];
        ty.dequantize(&blocks, &mut y);
        let square = |x: f32| f64::from(x).powi(2);
        let error: f64 = x.iter().zip(&y).map(|(x, y)| square(x - y)).sum();
        let error = (error / x.iter().map(|&x| square(x)).sum::<f64>()).sqrt();
        assert!(error <= limit, "{ty}: {error}");

        // Quantising the dequantised values again changes them little.
        blocks.clear();
        ty.quantize(&y, &mut blocks).unwrap();
        let mut z = vec![0.0; x.len()];
        ty.dequantize(&blocks, &mut z);
        let drift: f64 = y.iter().zip(&z).map(|(y, z)| square(y - z)).sum();
        let drift = (drift / x.iter().map(|&x| square(x)).sum::<f64>()).sqrt();
        let limit = match ty {
            // Each quantisation makes the values a tenth larger.
            TensorType::IQ1_S | TensorType::IQ1_M => 0.12,
            // The search may find another block that is about as good: other codes with another minimum, or other integer
            // scales with another factor.
            TensorType::Q2_K | TensorType::Q4_K | TensorType::Q5_K | TensorType::IQ4_XS => 0.15 * limit,
            _ => 0.03 * limit,
        };
        assert!(drift <= limit, "{ty}: drift {drift}");
    }
}

#[test]
fn zeros_constants_and_extremes_stay_finite() {
    let tiny = [1e-30f32; 256];
    let large = std::array::from_fn::<f32, 256, _>(|i| if i % 3 == 0 { 30000.0 } else { -1e-6 });
    let single = std::array::from_fn::<f32, 256, _>(|i| if i == 77 { -3.0 } else { 0.0 });
    for &ty in TensorType::ALL {
        for (name, x) in
            [("zeros", [0.0; 256]), ("ones", [1.0; 256]), ("tiny", tiny), ("large", large), ("single", single)]
        {
            let mut blocks = Vec::new();
            ty.quantize(&x, &mut blocks).unwrap();
            let mut y = [f32::NAN; 256];
            ty.dequantize(&blocks, &mut y);
            let largest = x.iter().fold(0f32, |m, x| m.max(x.abs()));
            // A codebook may have no point with equal elements.
            let tolerance = if ty.bits_per_weight() < 3.4375 || ty == TensorType::IQ3_S { 1.2 } else { 0.15 };
            let tolerance = if ty == TensorType::Q2_K { 0.15 } else { tolerance };
            // The largest number of NVFP4 is 448 times 6.
            let max_value = if ty == TensorType::NVFP4 { 2688.0 } else { f32::INFINITY };
            for (x, y) in x.map(|x| x.min(max_value)).iter().zip(y) {
                assert!((x - y).abs() <= largest * tolerance + 1e-6, "{ty} {name}: {x} became {y}");
            }
        }
    }
}

#[test]
fn integers_are_read_and_are_no_type_of_weights() {
    let ty = TensorType::I64;
    assert_eq!((ty.id(), ty.block_len(), ty.block_bytes(), ty.name()), (27, 1, 8, "I64"));
    assert_eq!(TensorType::from_id(27), Some(ty));
    assert!(ty.is_integer() && TensorType::ALL.iter().all(|ty| !ty.is_integer()));
    assert!("i64".parse::<TensorType>().is_err());
    let numbers = [0, -1, i64::MAX, 1 << 40];
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    let tensor = metal_attention_gguf::Tensor::in_memory("ids", [4, 1], ty, &bytes);
    assert_eq!(tensor.as_i64(), Some(&numbers[..]));
    assert_eq!((tensor.as_f32(), tensor.to_f32()), (None, numbers.map(|n| n as f32).to_vec()));
    let mut written = Vec::new();
    ty.quantize(&[3.0, -2.4], &mut written).unwrap();
    assert_eq!(written, [3_i64, -2].map(i64::to_le_bytes).concat());
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
    let floats_and_32 = [32.0, 16.0, 16.0, 4.5, 5.0, 5.5, 6.0, 8.5];
    let k_and_iq4 = [2.625, 3.4375, 4.5, 5.5, 6.5625, 4.5, 4.25];
    let iq = [3.4375, 3.0625, 2.5625, 2.3125, 2.0625, 1.75, 1.5625];
    let others = [4.25, 4.5, 2.0625, 1.6875, 2.25, 1.125];
    assert_eq!(bits, [&floats_and_32[..], &k_and_iq4, &iq, &others].concat());
    let error = "q9".parse::<TensorType>().unwrap_err().to_string();
    assert!(error.contains("`q9`") && error.contains("Q4_K, Q5_K"), "{error}");
    let error = TensorType::Q4_0.quantize(&[0.0; 33], &mut Vec::new()).unwrap_err().to_string();
    assert_eq!(error, "cannot quantise 33 values to Q4_0: it needs a multiple of 32");
}

#[test]
#[should_panic(expected = "do not hold")]
fn dequantise_refuses_mismatched_lengths() {
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

//! The kernels that measure a device's limits: they do the work that is counted for them.

use std::time::Duration;

use crate::support::matrices::repeated;
use crate::support::{poisoned, run, variants};
use metal_attention_gguf::TensorType;
use metal_attention_wgpu::WgpuCeilings;
use metal_attention_wgpu::kernels::{
    rate_floats, rate_floats_work, rate_matrix, rate_matrix_work, rate_read, rate_sums,
};

#[test]
fn every_word_is_read_once() {
    for gpu in variants() {
        for (n, groups) in [(1, 1), (255, 1), (1024, 1), (1025, 1), (5000, 2), (40_000, 8)] {
            let words: Vec<u32> = (0..4 * n as u32 + 4).map(|i| i.wrapping_mul(0x9E37_79B9)).collect();
            let (buffer, sums) = (gpu.upload("words", &words).unwrap(), poisoned(gpu, rate_sums(groups)));
            run(gpu, &[rate_read(gpu, n, groups, &buffer, &sums).unwrap()], 1);
            let got = gpu.read::<u32>(&sums, rate_sums(groups)).unwrap();
            let sum = |words: &[u32]| words.iter().fold(0, |a: u32, &b| a.wrapping_add(b));
            assert_eq!(sum(&got), sum(&words[..4 * n]), "{n} vectors, {groups} workgroups");
            let threads = rate_sums(groups);
            let first: u32 = (0..n).step_by(threads).map(|i| sum(&words[4 * i..4 * i + 4])).fold(0, u32::wrapping_add);
            assert_eq!(got[0], first);
        }
    }
}

#[test]
fn float_multiplications_equal_their_count() {
    for gpu in variants() {
        for (steps, groups) in [(4, 1), (64, 3)] {
            let (ones, sums) = (gpu.upload("operands", &[1.0f32; 4]).unwrap(), poisoned(gpu, rate_sums(groups)));
            run(gpu, &[rate_floats(gpu, steps, groups, &ones, &sums).unwrap()], 1);
            let got = gpu.read::<f32>(&sums, rate_sums(groups)).unwrap();
            // Every multiplication adds one. The eight vectors start at 0 to 7.
            assert!(got.iter().all(|&v| v == (4 * (28 + 8 * steps)) as f32), "{:?}", &got[..8]);
            let total: f64 = got.iter().map(|&v| f64::from(v)).sum();
            assert_eq!(total, (rate_floats_work(steps, groups) as usize + 112 * rate_sums(groups)) as f64);
        }
    }
}

#[test]
fn matrix_unit_multiplications_equal_their_count() {
    for gpu in variants() {
        let (steps, groups) = (8, 3);
        let (ones, sums) =
            (gpu.upload("operands", &[1.0f32; 4]).unwrap(), gpu.upload("sums", &vec![0.0f32; 4096]).unwrap());
        let dispatch = rate_matrix(gpu, steps, groups, &ones, &sums).unwrap();
        let work = rate_matrix_work(gpu.features(), steps, groups);
        assert_eq!(dispatch.is_some(), work.is_some());
        if let (Some(dispatch), Some(work)) = (dispatch, work) {
            run(gpu, &[dispatch], 1);
            let total: f64 = gpu.read::<f32>(&sums, 4096).unwrap().iter().map(|&v| f64::from(v)).sum();
            // Every product of two ones adds one.
            assert_eq!(total, work as f64);
        }
    }
}

#[test]
fn every_ceiling_is_a_positive_number() {
    for gpu in variants() {
        let ceilings = WgpuCeilings::new(gpu, Duration::from_millis(1));
        let launches = ceilings.launch_costs().unwrap();
        let mut found = vec![
            ceilings.read_bandwidth(1 << 20).unwrap(),
            ceilings.copy_bandwidth(1 << 20).unwrap(),
            ceilings.f32_rate().unwrap(),
            launches.dispatch,
            launches.dispatch_queued,
            launches.submission,
            launches.submission_queued,
        ];
        found.extend(ceilings.matrix_rate().unwrap());
        let w = repeated(TensorType::Q4_0, 64, 96, 8, 1);
        found.extend(ceilings.products(&[&w, &w], &[1, 2, 5]).unwrap());
        assert!(found.iter().all(|v| *v > 0.0 && v.is_finite()), "{found:?}");
    }
}

//! Fuzz target of picture files. Any bytes give either a typed error, or a picture within the limits, which each way of dividing
//! pictures divides or refuses.
#![no_main]

use libfuzzer_sys::fuzz_target;
use metal_attention_pictures::{Candidates, Filter, Layout, Limits, Picture, PixelRange, Preprocessing};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits { max_bytes: 1 << 20, max_pixels: 1 << 20 };
    let Ok(picture) = Picture::decode(bytes, &limits) else { return };
    assert!(picture.width() * picture.height() <= limits.max_pixels);
    assert_eq!(picture.rgb().len(), 3 * picture.width() * picture.height());
    let pixels = PixelRange::of_tokens(4, 64, 16);
    let layouts = [
        Layout::Square { side: 56 },
        Layout::Kept { multiple: 16, pixels },
        Layout::Idefics3 { tile: 32, longest: 96 },
        Layout::Tiled { tile: 48, candidates: Candidates::of_tiles(48, 1, 6) },
        Layout::MiniCpm { tile: 56, multiple: 7 },
    ];
    for layout in layouts {
        let preprocessing = Preprocessing { layout, filter: Filter::Bicubic, fill: [0; 3] };
        if let Ok(division) = preprocessing.apply(&picture) {
            assert!(!division.entries.is_empty());
        }
    }
});

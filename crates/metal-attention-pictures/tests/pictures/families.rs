//! All families against llama.cpp's preprocessing.

use std::fmt::Write;
use std::path::Path;

use metal_attention_pictures::{
    Candidates, Division, Filter, Layout, Limits, Picture, PictureError, PixelRange, Place, Preprocessing,
};

use super::data;

/// The preprocessing of a tiny model of each family, by llama.cpp's settings for it.
fn family(name: &str) -> Preprocessing {
    let tokens = |min, max, multiple| Layout::Kept { multiple, pixels: PixelRange::of_tokens(min, max, multiple) };
    let pixels = |min, max, multiple| Layout::Kept { multiple, pixels: PixelRange { min, max } };
    let square = |side| Layout::Square { side };
    let tiled = |tile, candidates| Layout::Tiled { tile, candidates };
    let layout = match name {
        "gemma3" => square(112),
        "gemma3nv" => square(64),
        "llava" => square(56),
        "janus-pro" => square(48),
        "qwen3vl" | "qwen35" | "qwen2.5vl" | "glm4v" => tokens(8, 4096, 16),
        "qwen2vl" => tokens(8, 4096, 20),
        "gemma4v" => tokens(70, 1120, 24),
        "gemma4uv" => tokens(70, 1120, 12),
        "pixtral" => tokens(8, 1024, 6),
        "mistral3" => tokens(8, 1024, 14),
        "kimivl" => tokens(8, 1024, 12),
        "kimik25" => pixels(1500, 30000, 14),
        "paddleocr" => pixels(6000, 40000, 16),
        "dots-ocr" => pixels(3136, 60000, 14),
        "phi4" => pixels(4000, 30000, 7),
        "lightonocr" => Layout::LongestSide { longest: 168, multiple: 14, pixels: PixelRange::ALL },
        "idefics3" => Layout::Idefics3 { tile: 64, longest: 192 },
        "llava-next" => tiled(56, Candidates::listed(&[56, 112, 112, 56, 112, 112, 56, 168, 168, 56])),
        "granite-vision" => tiled(56, Candidates::listed(&[56, 112, 112, 56, 112, 112])),
        "internvl" => tiled(48, Candidates::of_tiles(48, 1, 6)),
        "llama4" => tiled(48, Candidates::up_to_square(48, 3)),
        "minicpmv" => Layout::MiniCpm { tile: 56, multiple: 7 },
        "minicpmv4.6" => Layout::MiniCpm { tile: 112, multiple: 28 },
        "lfm2" => Layout::Lfm2 { patch: 16, merge: 2, pixels: PixelRange::of_tokens(64, 256, 32) },
        _ => panic!("unknown family {name}"),
    };
    let filter = match name {
        "gemma3" | "gemma3nv" | "lfm2" | "phi4" => Filter::Bilinear,
        "idefics3" => Filter::Lanczos,
        _ => Filter::Bicubic,
    };
    let fill = match name {
        "llava" => [122, 116, 104],
        "janus-pro" => [127; 3],
        _ => [0; 3],
    };
    Preprocessing { layout, filter, fill }
}

/// Sizes as in `expected.txt`: a count and a size for each run of equal ones.
fn sizes(division: &Division) -> String {
    let sizes: Vec<_> = division.entries.iter().map(|entry| (entry.picture.width(), entry.picture.height())).collect();
    let runs = sizes.chunk_by(|a, b| a == b);
    runs.fold(String::new(), |mut text, run| {
        let _ = write!(text, " {}*{}x{}", run.len(), run[0].0, run[0].1);
        text
    })
}

/// The CRC-32 of the CRC-32s of all entries.
fn checksum(division: &Division) -> u32 {
    let crcs = division.entries.iter().flat_map(|entry| crc32fast::hash(entry.picture.rgb()).to_le_bytes());
    crc32fast::hash(&crcs.collect::<Vec<_>>())
}

/// Compares with the lines of `expected.txt`, those of pictures that `read` has. Returns how many have the same pixels.
fn compare(read: impl Fn(&str) -> Option<Vec<u8>>) -> usize {
    let expected = String::from_utf8(data("expected.txt")).unwrap();
    let mut n_exact = 0;
    for line in expected.lines() {
        let (name, rest) = line.split_once(' ').unwrap();
        let (file, rest) = rest.split_once(' ').unwrap();
        let Some(bytes) = read(file) else { continue };
        let division = family(name).apply(&Picture::decode(&bytes, &Limits::default()).unwrap()).unwrap();
        assert_eq!(sizes(&division), rest[8..], "{name} {file}");
        let n_tiles = division.entries.iter().filter(|entry| entry.place != Place::Whole).count();
        assert_eq!(division.rows * division.columns, n_tiles, "{name} {file}");
        let is_exact = format!("{:08x}", checksum(&division)) == rest[..8];
        // JPEG decoders differ by a level here and there.
        assert!(is_exact || file == "photo.jpg", "{name} {file}");
        n_exact += usize::from(is_exact);
    }
    n_exact
}

#[test]
fn all_families_see_the_same_pixels_as_in_llama_cpp() {
    let n_exact = compare(|file| ["small.png", "gray.png"].contains(&file).then(|| data(file)));
    assert_eq!(n_exact, 27 * 2);
}

/// All seven pictures: `PICTURES=folder cargo test -p metal-attention-pictures -- --ignored`.
#[test]
#[ignore = "needs the folder of pictures that the variable PICTURES names"]
fn all_pictures_are_the_same_as_in_llama_cpp() {
    let folder = std::env::var("PICTURES").unwrap();
    let n_exact = compare(|file| Some(std::fs::read(Path::new(&folder).join(file)).unwrap()));
    println!("{n_exact} exact");
    assert!(n_exact >= 27 * 5);
}

fn places(division: &Division) -> Vec<Place> {
    division.entries.iter().map(|entry| entry.place).collect()
}

#[test]
fn tiles_come_in_rows_and_the_whole_last_or_first() {
    let tile = |row, column| Place::Tile { row, column };
    let picture = Picture::new(130, 90, vec![7; 130 * 90 * 3]).unwrap();
    let internvl = family("internvl").apply(&picture).unwrap();
    assert_eq!((internvl.rows, internvl.columns), (2, 3));
    let expected = [tile(0, 0), tile(0, 1), tile(0, 2), tile(1, 0), tile(1, 1), tile(1, 2), Place::Whole];
    assert_eq!(places(&internvl), expected);
    let minicpm = family("minicpmv").apply(&picture).unwrap();
    assert_eq!(minicpm.entries[0].place, Place::Whole);
    assert_eq!(minicpm.entries[1].place, tile(0, 0));
    let single = family("minicpmv").apply(&Picture::new(9, 9, vec![7; 243]).unwrap()).unwrap();
    assert_eq!((places(&single), single.rows, single.columns), (vec![Place::Whole], 0, 0));
}

#[test]
fn large_pictures_of_lfm2_are_tiles_and_a_thumbnail() {
    let picture = Picture::new(1100, 500, vec![200; 1100 * 500 * 3]).unwrap();
    let division = family("lfm2").apply(&picture).unwrap();
    assert_eq!((division.rows, division.columns), (1, 2));
    assert_eq!(sizes(&division), " 2*512x512 1*736x320");
    // The tiles are fitted: 1024 x 466 pixels, 23 black rows above.
    let tile = &division.entries[1].picture;
    assert_eq!((tile.row(22)[0], tile.row(23)[0], tile.row(488)[0], tile.row(489)[0]), (0, 200, 200, 0));
}

#[test]
fn users_limit_tokens_where_the_size_is_kept() {
    let picture = Picture::new(400, 300, vec![7; 400 * 300 * 3]).unwrap();
    let mut qwen = family("qwen3vl");
    let n_tokens = |preprocessing: &Preprocessing| {
        let whole = &preprocessing.apply(&picture).unwrap().entries[0].picture;
        whole.width() * whole.height() / 256
    };
    assert_eq!(n_tokens(&qwen), 25 * 19);
    qwen.limit_tokens(None, Some(100)).unwrap();
    assert_eq!(n_tokens(&qwen), 11 * 8);
    qwen.limit_tokens(Some(90), None).unwrap();
    assert_eq!(qwen.layout, Layout::Kept { multiple: 16, pixels: PixelRange { min: 90 * 256, max: 100 * 256 } });
    let error = qwen.limit_tokens(Some(101), None).unwrap_err();
    assert_eq!(error, PictureError::EmptyRange { min: 101 * 256, max: 100 * 256 });
    let mut gemma = family("gemma3");
    gemma.limit_tokens(Some(1), Some(1)).unwrap();
    assert_eq!(gemma, family("gemma3"));
}

#[test]
fn settings_of_a_damaged_model_are_errors() {
    let picture = Picture::new(40, 30, vec![7; 40 * 30 * 3]).unwrap();
    let huge = usize::MAX;
    for value in [0, huge, huge / 2 + 1, 1 << 20] {
        let range = PixelRange { min: value, max: huge };
        let layouts = [
            Layout::Square { side: value },
            Layout::Kept { multiple: value, pixels: PixelRange::ALL },
            Layout::LongestSide { longest: 99, multiple: value, pixels: PixelRange::ALL },
            Layout::LongestSide { longest: value, multiple: 14, pixels: PixelRange::ALL },
            Layout::Idefics3 { tile: value, longest: 99 },
            Layout::Idefics3 { tile: 8, longest: value },
            Layout::MiniCpm { tile: 8, multiple: value },
            Layout::Lfm2 { patch: value, merge: 2, pixels: PixelRange::ALL },
        ];
        for layout in layouts {
            let preprocessing = Preprocessing { layout, filter: Filter::Bilinear, fill: [0; 3] };
            assert!(preprocessing.apply(&picture).is_err(), "{preprocessing:?}");
        }
        // These need not be errors, but end.
        for layout in [
            Layout::MiniCpm { tile: value, multiple: 8 },
            Layout::Tiled { tile: value, candidates: Candidates(vec![(value, value), (60, 60)]) },
            Layout::Tiled { tile: 8, candidates: Candidates(vec![(value, value)]) },
            Layout::Kept { multiple: 8, pixels: range },
            Layout::Kept { multiple: 8, pixels: PixelRange { min: 0, max: value } },
            Layout::Lfm2 { patch: 8, merge: 2, pixels: PixelRange { min: 0, max: value } },
        ] {
            let _ = Preprocessing { layout, filter: Filter::Bilinear, fill: [0; 3] }.apply(&picture);
        }
    }
}

#[test]
fn long_pictures_are_divided_or_refused() {
    for (width, height) in [(1, 1), (1, 300), (3000, 2), (1, 30000), (30000, 1)] {
        let picture = Picture::new(width, height, vec![90; width * height * 3]).unwrap();
        let expected = String::from_utf8(data("expected.txt")).unwrap();
        let names: std::collections::BTreeSet<_> = expected.lines().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(names.len(), 27);
        for name in names {
            match family(name).apply(&picture) {
                Ok(division) => assert!(!division.entries.is_empty()),
                Err(PictureError::TooLong { .. }) => assert!(width.max(height) >= 300, "{name} {width} x {height}"),
                Err(error) => panic!("{name} {width} x {height}: {error}"),
            }
        }
    }
}

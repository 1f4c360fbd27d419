//! Pictures: `run --image` and `encode-image`, with a synthetic encoder beside the built-in model.

use std::fs;
use std::path::Path;

use metal_attention_testing::mmproj;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{ids, run, run_with_input, stderr, stdout};

/// A folder with the model `tiny.gguf`, its encoder, and two pictures.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(metal_attention_testing::stories(), folder.path().join("tiny.gguf")).unwrap();
    fs::write(folder.path().join("tiny-mmproj-f32.gguf"), mmproj::gemma3(64)).unwrap();
    for seed in [1, 2] {
        fs::write(folder.path().join(format!("{seed}.bmp")), mmproj::bmp(40, 30, seed)).unwrap();
    }
    folder
}

/// `args` with `@` for the folder.
fn within(folder: &Path, args: &str) -> Vec<String> {
    args.split(' ').map(|arg| arg.replace('@', folder.to_str().unwrap())).collect()
}

/// Runs with `args`, of which `text` is the last.
fn with_text(folder: &Path, args: &str, text: &str) -> std::process::Output {
    let args = within(folder, args);
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    args.push(text);
    run(&args)
}

/// The ids of the prompt and of its continuation.
fn lines(output: std::process::Output) -> (Vec<u32>, Vec<u32>) {
    let text = stdout(output);
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tokens = lines.iter().filter(|l| l["type"] == "token").map(|l| l["id"].as_u64().unwrap() as u32).collect();
    (ids(&lines[0]["prompt_ids"]), tokens)
}

const RUN: &str = "run -m @/tiny.gguf --device cpu --temp 0 -n 5 --ignore-eos --json";

#[test]
fn pictures_stand_before_the_text_or_where_it_says() {
    let folder = folder();
    let of = |pictures: &str, text: &str| lines(with_text(folder.path(), &format!("{RUN} {pictures} -p"), text));
    let (before, tokens) = of("--image @/1.bmp", "Once upon");
    // BOS, four rows and the texts around them; ids of rows are 0.
    let rows = |ids: &[u32]| ids.iter().filter(|id| **id == 0).count();
    assert_eq!((before[0], rows(&before), tokens.len()), (1, 4, 5));
    assert_eq!(of("--image @/1.bmp", "<image>Once upon"), (before.clone(), tokens.clone()));
    let (after, _) = of("--image @/1.bmp", "Once upon <image> a time");
    let first_row = |ids: &[u32]| ids.iter().position(|id| *id == 0).unwrap();
    assert!(rows(&after) == 4 && first_row(&after) > first_row(&before));
    let (both, _) = of("--image @/1.bmp --image @/2.bmp", "Once <image> upon");
    assert_eq!(rows(&both), 8);
    // The file may be named, and a picture may come from stdin.
    let named = of("--image @/1.bmp --mmproj @/tiny-mmproj-f32.gguf", "Once upon");
    assert_eq!(named, (before, tokens.clone()));
    let args = within(folder.path(), &format!("{RUN} --image - -p"));
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    args.push("Once upon");
    assert_eq!(lines(run_with_input(&args, &mmproj::bmp(40, 30, 1))).1, tokens);
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let folder = folder();
    let failed = |args: &str, text: &str| {
        let output = with_text(folder.path(), args, text);
        assert!(!output.status.success() && output.stdout.is_empty(), "{args}");
        stderr(&output)
    };
    let error = failed("run -m @/tiny.gguf --image @/1.bmp -p", "a <image> b <image>");
    assert!(error.contains("2 places for pictures (<image>), and there are 1"), "{error}");
    let error = failed("run -m @/tiny.gguf --image @/none.png -p", "a");
    assert!(error.contains("none.png"), "{error}");
    fs::write(folder.path().join("cut.bmp"), &mmproj::bmp(40, 30, 1)[..100]).unwrap();
    let error = failed("run -m @/tiny.gguf --image @/cut.bmp -p", "a");
    assert!(error.contains("cut.bmp"), "{error}");
    // Two encoders of one type that have the model's name.
    fs::write(folder.path().join("mmproj-tiny-f32.gguf"), mmproj::gemma3(64)).unwrap();
    let error = failed("run -m @/tiny.gguf --image @/1.bmp -p", "a");
    assert!(error.contains("--mmproj") && error.contains("mmproj-tiny-f32.gguf"), "{error}");
    for name in ["mmproj-tiny-f32.gguf", "tiny-mmproj-f32.gguf"] {
        fs::remove_file(folder.path().join(name)).unwrap();
    }
    let error = failed("run -m @/tiny.gguf --image @/1.bmp -p", "a");
    assert!(error.contains("sees no pictures: there is no mmproj file beside it"), "{error}");
    // A file of another width is not found, but may be named.
    fs::write(folder.path().join("mmproj.gguf"), mmproj::gemma3(48)).unwrap();
    let error = failed("run -m @/tiny.gguf --image @/1.bmp -p", "a");
    assert!(error.contains("sees no pictures: there is no mmproj file beside it"), "{error}");
    let error = failed("run -m @/tiny.gguf --mmproj @/mmproj.gguf --image @/1.bmp -p", "a");
    assert!(error.contains("rows of 48 values, and the model reads rows of 64"), "{error}");
}

#[test]
fn encode_image_writes_rows_and_chunks() {
    let folder = folder();
    let out = folder.path().join("rows.npy");
    let args = "encode-image -m @/tiny.gguf --device cpu --image @/1.bmp --json -o @/rows.npy";
    let args = within(folder.path(), args);
    let text = stdout(run(&args.iter().map(String::as_str).collect::<Vec<_>>()));
    let chunks: Value = serde_json::from_str(&text).unwrap();
    let chunks = chunks["chunks"].as_array().unwrap();
    let types: Vec<&str> = chunks.iter().map(|chunk| chunk["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["text", "image", "text"]);
    assert_eq!(
        (chunks[1]["tokens"].as_u64(), chunks[1]["nx"].as_u64(), chunks[1]["ny"].as_u64()),
        (Some(4), Some(2), Some(2))
    );
    assert_eq!(ids(&chunks[0]["ids"])[0], 1);
    let file = fs::read(out).unwrap();
    assert!(String::from_utf8_lossy(&file[..128]).contains("'shape': (4, 64)"));
    assert_eq!(file.len(), 128 + 4 * 4 * 64);
    let args = within(folder.path(), "encode-image -m @/tiny.gguf --device cpu --image @/1.bmp");
    let text = stdout(run(&args.iter().map(String::as_str).collect::<Vec<_>>()));
    assert_eq!(text, "40 x 30 pixels: 4 rows in 1 part(s)\n");
}

#[test]
fn a_conversation_takes_pictures() {
    let folder = folder();
    let args = within(folder.path(), "chat -m @/tiny.gguf --device cpu --temp 0 -n 5");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let at = |text: &str| text.replace('@', folder.path().to_str().unwrap());
    let talk = |lines: &str| run_with_input(&args, at(lines).as_bytes());
    let output = talk("/image @/1.bmp\nOnce upon\n/image @/2.bmp a time\n/save @/saved.json\n/stats\n");
    let notes = stderr(&output);
    assert_eq!(stdout(output).lines().count(), 2, "{notes}");
    assert!(notes.contains("1.bmp, 40 x 30 pixels, comes with the next message"), "{notes}");
    let saved: Value = serde_json::from_str(&fs::read_to_string(folder.path().join("saved.json")).unwrap()).unwrap();
    let texts: Vec<&str> =
        saved.as_array().unwrap().iter().map(|message| message["content"].as_str().unwrap()).collect();
    assert_eq!((texts[0], texts[2]), ("<image>Once upon", "<image>a time"));
    // Four rows and the texts around them for each picture.
    let context = |notes: &str| -> usize {
        let line = notes.lines().find(|line| line.starts_with("context")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let without = context(&stderr(&talk("Once upon\na time\n/stats\n")));
    assert!(context(&notes) >= without + 8, "{notes}");
    let output = talk("/image @/none.png\n");
    assert!(!output.status.success() && stderr(&output).contains("none.png"));
}

// SPDX-License-Identifier: Apache-2.0

#include "formats/model_files/model_files.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "formats/model_files/config_text.h"
#include "formats/torch/pickle/text.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

constexpr std::string_view kDocument = "model_files";
constexpr uint64_t kMaxConfig = 1 << 20;   // label maps make them long
constexpr uint64_t kMaxText = 64 << 10;    // of any other that the manifest holds
constexpr uint64_t kMaxGiven = 256 << 20;  // of all in a directory that a mount names

constexpr std::array<std::string_view, 24> kNames = {"added_tokens.json",
                                                     "chat_template.json",
                                                     "config.json",
                                                     "config_sentence_transformers.json",
                                                     "generation_config.json",
                                                     "merges.txt",
                                                     "modules.json",
                                                     "normalizer.json",
                                                     "preprocessor_config.json",
                                                     "processor_config.json",
                                                     "qwen.tiktoken",
                                                     "sentence_bert_config.json",
                                                     "sentencepiece.bpe.model",
                                                     "source.spm",
                                                     "special_tokens_map.json",
                                                     "spiece.model",
                                                     "spm.model",
                                                     "target.spm",
                                                     "tekken.json",
                                                     "tokenizer.json",
                                                     "tokenizer_config.json",
                                                     "video_preprocessor_config.json",
                                                     "vocab.json",
                                                     "vocab.txt"};
constexpr std::array<std::string_view, 3> kSuffixes = {".jinja", ".tiktoken", ".model"};
// Code of models that transformers does not have itself.
constexpr std::array<std::string_view, 6> kCode = {"configuration_",    "modeling_",
                                                   "tokenization_",     "processing_",
                                                   "image_processing_", "feature_extraction_"};

Result<std::string> ReadConfig(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(std::string text, ReadWhole(root, path, kMaxConfig));
  auto facts = ReadConfigFacts(text);
  if (!facts) return Fail(std::move(facts).error().WithContext(root.PathOf(path)));
  return text;
}

Document Render(const ModelFiles& files) {
  PickleBuilder pickle;
  std::vector<std::pair<NodeId, NodeId>> items;
  for (const ModelFile& file : files.files) {
    const NodeId name = pickle.String(file.name);
    const std::string* text = file.text();
    items.emplace_back(
        name, text != nullptr ? pickle.String(*text)
                              : pickle.Int(static_cast<int64_t>(std::get<BlobIndex>(file.body))));
  }
  const NodeId root = pickle.Dict(items);
  auto printed = PrintPickle(std::move(pickle).Finish(root));
  CKPT_CHECK(printed.has_value());  // texts and numbers
  return Document{
      .key = std::string(kDocument), .scope = "", .pickle = *std::move(printed), .tensors = {}};
}

void Add(ModelFiles& files, std::string name, std::string text) {
  files.files.push_back({std::move(name), std::make_shared<const std::string>(std::move(text))});
}

// One file: short ones as texts, others as blobs.
Result<ModelFile> CarryOne(Assembler& assembler, const std::shared_ptr<const Root>& root,
                           const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler.AddFile(assembler.AddRoot(root), path));
  const std::string name = LastComponent(path);
  const bool config = name == kModelConfig;
  if (config || assembler.blob(blob).stamp.size <= kMaxText) {
    CKPT_ASSIGN_OR_RETURN(std::string text,
                          config ? ReadConfig(*root, path) : ReadWhole(*root, path, kMaxText));
    if (IsUtf8(text)) return ModelFile{name, std::make_shared<const std::string>(std::move(text))};
  }
  return ModelFile{name, blob};
}

void SortByName(ModelFiles& files) {
  std::sort(files.files.begin(), files.files.end(),
            [](const ModelFile& a, const ModelFile& b) { return a.name < b.name; });
}

// Those in one directory; nothing unless its config can be carried.
Result<ModelFiles> CarryDirectory(Assembler& assembler, const std::shared_ptr<const Root>& root,
                                  const std::string& directory) {
  ModelFiles files;
  std::vector<std::string> names{std::string(kModelConfig)};
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> beside, root->List(directory));
  for (const RootEntry& entry : beside) {
    if (entry.name != kModelConfig && IsModelFile(entry.name)) names.push_back(entry.name);
  }
  for (const std::string& name : names) {
    const std::string path = JoinPath(directory, name);
    CKPT_ASSIGN_OR_RETURN(const bool regular, HasFile(*root, path));
    auto carried = regular ? CarryOne(assembler, root, path) : Fail(ErrorCode::kNotFound, "");
    if (carried) {
      files.files.push_back(*std::move(carried));
      continue;
    }
    if (regular) {
      CKPT_RETURN_IF_ERROR(LeaveOut(std::move(carried).error(), assembler.header()));
    }
    if (name == kModelConfig) break;
  }
  SortByName(files);
  return files;
}

}  // namespace

const std::string* ModelFile::text() const {
  const auto* held = std::get_if<std::shared_ptr<const std::string>>(&body);
  return held == nullptr ? nullptr : held->get();
}

const ModelFile* ModelFiles::Find(std::string_view name) const {
  const auto found = std::lower_bound(
      files.begin(), files.end(), name,
      [](const ModelFile& file, std::string_view wanted) { return file.name < wanted; });
  return found != files.end() && found->name == name ? &*found : nullptr;
}

const std::string* ModelFiles::config() const {
  const ModelFile* file = Find(kModelConfig);
  return file == nullptr ? nullptr : file->text();
}

bool IsModelFile(std::string_view name) {
  if (name.empty() || name.front() == '.') return false;
  if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) return true;
  const auto ends = [&](std::string_view suffix) { return name.ends_with(suffix); };
  if (std::any_of(kSuffixes.begin(), kSuffixes.end(), ends)) return true;
  return name.ends_with(".py") &&
         std::any_of(kCode.begin(), kCode.end(),
                     [&](std::string_view begin) { return name.starts_with(begin); });
}

Status LeaveOut(Error why, StepModel& header) {
  const bool refused = why.code == ErrorCode::kInvalid || why.code == ErrorCode::kNotFound ||
                       why.code == ErrorCode::kPermission || why.code == ErrorCode::kUnsupported;
  if (!refused) return Fail(std::move(why));
  header.notes.push_back(StrCat("left out: ", why.message));
  return {};
}

Result<ModelFiles> CarryModelFiles(Assembler& assembler, const std::shared_ptr<const Root>& root,
                                   std::string directory) {
  if (directory.ends_with('/')) directory.pop_back();
  while (true) {
    CKPT_ASSIGN_OR_RETURN(ModelFiles files, CarryDirectory(assembler, root, directory));
    if (!files.files.empty()) {
      assembler.header().documents.push_back(Render(files));
      return files;
    }
    if (directory.empty()) return files;
    directory = ParentPath(directory);
  }
}

Result<ModelFiles> ModelFilesOf(const StepModel& step) {
  ModelFiles files;
  const Document* document = step.FindDocument(kDocument);
  if (document == nullptr) return files;
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
  for (const auto& [key, value] : RootOf(tree).Items()) {
    const auto name = key.String();
    const auto text = value.String();
    const auto blob = value.Int();
    const bool inside = blob && *blob >= 0 && static_cast<uint64_t>(*blob) < step.blobs.size();
    if (!name || !IsModelFile(*name) || name->find('/') != std::string_view::npos ||
        (!text && !inside)) {
      return Fail(ErrorCode::kInvalid, "document 'model_files': not names with texts or blobs");
    }
    if (text) {
      Add(files, std::string(*name), std::string(*text));
    } else {
      files.files.push_back({std::string(*name), BlobIndex{static_cast<uint32_t>(*blob)}});
    }
  }
  SortByName(files);
  return files;
}

Result<ModelFiles> ReadModelFiles(const std::string& directory) {
  ModelFiles files;
  uint64_t left = kMaxGiven;
  const FileRoot root(directory);
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(""));
  for (const RootEntry& entry : entries) {  // sorted
    if (entry.kind != EntryKind::kFile || !IsModelFile(entry.name)) continue;
    CKPT_ASSIGN_OR_RETURN(std::string text, entry.name == kModelConfig
                                                ? ReadConfig(root, entry.name)
                                                : ReadWhole(root, entry.name, left));
    left -= std::min<uint64_t>(left, text.size());
    Add(files, entry.name, std::move(text));
  }
  if (files.config() != nullptr) return files;
  return Fail(ErrorCode::kInvalid, StrCat(directory, ": does not have a config.json"));
}

}  // namespace ckptfs

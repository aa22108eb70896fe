// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/model_files.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "formats/tools/config_text.h"
#include "formats/tools/tool_files.h"
#include "formats/torch/pickle/text.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMaxConfig = 1 << 20;   // label maps make them long
constexpr uint64_t kMaxText = 64 << 10;    // of any other that the manifest holds
constexpr uint64_t kMaxGiven = 256 << 20;  // of all in a directory that a mount names
constexpr size_t kMaxFolderFiles = 64;     // of all folders beside a model

// Folders that loaders look into: a tokenizer's further templates, and what
// modules.json lists (sentence-transformers).
constexpr std::string_view kTemplates = "additional_chat_templates";
constexpr std::string_view kModules = "modules.json";
constexpr std::array<std::string_view, 3> kFolderSuffixes = {".json", ".txt", ".jinja"};

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

void Add(ModelFiles& files, std::string name, std::string text) {
  files.files.push_back({std::move(name), std::make_shared<const std::string>(std::move(text))});
}

bool IsConfig(std::string_view name) { return name == kModelConfig || name == kAdapterConfig; }

// One file: short ones as texts, others as blobs.
Result<ModelFile> CarryOne(Assembler& assembler, const std::shared_ptr<const Root>& root,
                           const std::string& directory, const std::string& name) {
  const std::string path = JoinPath(directory, name);
  CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler.AddFile(assembler.AddRoot(root), path));
  const bool config = IsConfig(name);
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

// The files, as <folder>/<name>, that are taken out of folders beside a model;
// `left_out` gets why others are not.  Names in modules.json are hostile.
Result<std::vector<std::string>> FilesOfFolders(const Root& root, const std::string& directory,
                                                const ModelFiles& models,
                                                std::vector<Error>& left_out) {
  std::set<std::string> folders{std::string(kTemplates)};
  const ModelFile* modules = models.Find(kModules);
  if (modules != nullptr && modules->text() != nullptr) {
    for (std::string& folder : ReadModuleFolders(*modules->text())) {
      folders.insert(std::move(folder));
    }
  }
  const auto leave = [&](const std::string& path, const std::string& why) {
    left_out.push_back(
        {ErrorCode::kUnsupported, StrCat(root.PathOf(JoinPath(directory, path)), ": ", why)});
  };
  std::vector<std::string> files;
  for (const std::string& folder : folders) {
    if (!IsFolderFile(folder + "/x.json")) continue;
    CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(root, JoinPath(directory, folder)));
    if (!there) continue;
    CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries,
                          root.List(JoinPath(directory, folder)));
    for (const RootEntry& entry : entries) {
      std::string path = StrCat(folder, "/", entry.name);
      if (!IsFolderFile(path)) {
        leave(path, "only text files of a module's folder are taken");
      } else if (files.size() == kMaxFolderFiles) {
        leave(path, StrCat("more than ", kMaxFolderFiles, " files in folders"));
        return files;
      } else {
        files.push_back(std::move(path));
      }
    }
  }
  return files;
}

// A directory where model files are looked for.  If it is the step's
// own, CarryOwnFiles, which carries all of it, says what is left out.
struct Beside {
  std::string directory;
  bool own = false;
};

// Carries a file if it is one; true if it was.  Leaves out what cannot be read, and what fewer
// may read than the step so far, which would hide it; but for the config, which other views need.
Result<bool> TryCarry(Assembler& assembler, const std::shared_ptr<const Root>& root,
                      const Beside& beside, const std::string& name, ModelFiles& files) {
  const std::string& directory = beside.directory;
  const std::string path = JoinPath(directory, name);
  CKPT_ASSIGN_OR_RETURN(const bool regular, HasFile(*root, path));
  if (!regular) return false;
  const auto readable = ReadersSoFar(assembler.header()).MayRead(*root, path);
  if (!readable) {
    CKPT_RETURN_IF_ERROR(LeaveOut(Error(readable.error()), assembler.header()));
    return false;
  }
  if (!*readable && !IsConfig(name)) {
    if (!beside.own) LeaveOut(assembler.header(), PrivateFile(path));
    return false;
  }
  auto carried = CarryOne(assembler, root, directory, name);
  if (carried) {
    files.files.push_back(*std::move(carried));
    return true;
  }
  CKPT_RETURN_IF_ERROR(LeaveOut(std::move(carried).error(), assembler.header()));
  return false;
}

// Those in one directory; nothing unless its config can be carried, which is called so.
Result<ModelFiles> CarryDirectory(Assembler& assembler, const std::shared_ptr<const Root>& root,
                                  const Beside& place, std::string_view config = kModelConfig) {
  ModelFiles files;
  std::vector<std::string> names{std::string(config)};
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> beside, root->List(place.directory));
  for (const RootEntry& entry : beside) {
    if (entry.name != config && IsModelFile(entry.name)) names.push_back(entry.name);
  }
  for (const std::string& name : names) {
    CKPT_ASSIGN_OR_RETURN(const bool carried, TryCarry(assembler, root, place, name, files));
    if (name == config && !carried) return files;
  }
  SortByName(files);
  std::vector<Error> left_out;
  CKPT_ASSIGN_OR_RETURN(names, FilesOfFolders(*root, place.directory, files, left_out));
  for (const std::string& name : names) {
    CKPT_RETURN_IF_ERROR(TryCarry(assembler, root, place, name, files));
  }
  for (Error& why : left_out) {
    CKPT_RETURN_IF_ERROR(LeaveOut(std::move(why), assembler.header()));
  }
  SortByName(files);
  return files;
}

}  // namespace

bool IsModelFile(std::string_view name) {
  if (name.empty() || name.front() == '.') return false;
  if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) return true;
  const auto ends = [&](std::string_view suffix) { return name.ends_with(suffix); };
  if (std::any_of(kSuffixes.begin(), kSuffixes.end(), ends)) return true;
  return name.ends_with(".py") &&
         std::any_of(kCode.begin(), kCode.end(),
                     [&](std::string_view begin) { return name.starts_with(begin); });
}

bool IsFolderFile(std::string_view path) {
  const size_t slash = path.find('/');
  if (slash == std::string_view::npos || slash == 0 || path.front() == '.') return false;
  const std::string_view name = path.substr(slash + 1);
  if (name.empty() || name.front() == '.' || name.find('/') != std::string_view::npos) return false;
  return !name.ends_with(".index.json") &&
         std::any_of(kFolderSuffixes.begin(), kFolderSuffixes.end(),
                     [&](std::string_view suffix) { return name.ends_with(suffix); });
}

Status LeaveOut(Error why, StepModel& header) {
  const bool refused = why.code == ErrorCode::kInvalid || why.code == ErrorCode::kNotFound ||
                       why.code == ErrorCode::kPermission || why.code == ErrorCode::kUnsupported;
  if (!refused) return Fail(std::move(why));
  LeaveOut(header, {LeftOutPart::kDocument, "a file beside the step", why.message, why.needs});
  return {};
}

Result<ModelFiles> CarryModelFiles(Assembler& assembler, const std::shared_ptr<const Root>& root,
                                   std::string directory) {
  if (directory.ends_with('/')) directory.pop_back();
  for (bool own = true;; own = false) {
    CKPT_ASSIGN_OR_RETURN(ModelFiles files, CarryDirectory(assembler, root, {directory, own}));
    if (!files.files.empty()) {
      assembler.header().facts.model_files = files;
      return files;
    }
    if (directory.empty()) return files;
    directory = ParentPath(directory);
  }
}

Result<ModelFiles> CarryAdapterFiles(Assembler& assembler, const std::shared_ptr<const Root>& root,
                                     std::string directory) {
  if (directory.ends_with('/')) directory.pop_back();
  CKPT_ASSIGN_OR_RETURN(ModelFiles files,
                        CarryDirectory(assembler, root, {directory, true}, kAdapterConfig));
  assembler.header().facts.model_files = files;
  return files;
}

void CarryConfig(Assembler& assembler, std::string config) {
  Add(assembler.header().facts.model_files, std::string(kModelConfig), std::move(config));
  assembler.header().facts.config_made = true;
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
  std::vector<Error> left_out;  // the directory is not a step's: nobody takes notes
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> deeper,
                        FilesOfFolders(root, "", files, left_out));
  for (const std::string& path : deeper) {
    CKPT_ASSIGN_OR_RETURN(const bool regular, HasFile(root, path));
    if (!regular) continue;
    CKPT_ASSIGN_OR_RETURN(std::string text, ReadWhole(root, path, left));
    left -= std::min<uint64_t>(left, text.size());
    Add(files, path, std::move(text));
  }
  SortByName(files);
  if (files.config() != nullptr) return files;
  return Fail(ErrorCode::kInvalid, StrCat(directory, ": does not have a config.json"));
}

}  // namespace ckptfs

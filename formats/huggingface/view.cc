// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/view.h"

#include <algorithm>
#include <span>
#include <utility>
#include <variant>

#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/dialect/shown_names.h"
#include "core/view/shard.h"
#include "formats/huggingface/config_match.h"
#include "formats/huggingface/shard_index.h"
#include "formats/huggingface/shown_tensors.h"
#include "formats/huggingface/whole_files.h"
#include "formats/tools/config_text.h"

namespace ckptfs {
namespace {

using huggingface::ShardName;
using huggingface::ShownTensor;
using huggingface::WholeFile;

constexpr std::string_view kTop = "huggingface";
constexpr std::string_view kIndexName = "model.safetensors.index.json";

tl::unexpected<Error> NoSuch(std::string_view path) {
  return Fail(ErrorCode::kNotFound, StrCat("no '", path, "' in a Hugging Face view"));
}

// Consecutive tensors of the step; a file widest dtype first, so that each lies
// aligned.  Or those of a source's file, as they lie there.
using Shard = std::vector<ShownTensor>;

using TextOrBlob = std::variant<std::shared_ptr<const std::string>, BlobIndex>;
struct ShownFile {
  std::string path;  // below huggingface/
  ViewEntry entry;
  std::variant<size_t, TextOrBlob> body;  // a shard by number, or what it holds
};

std::vector<SafetensorsEntry> EntriesOf(const StepModel& step, const Shard& shard) {
  std::vector<SafetensorsEntry> entries;
  entries.reserve(shard.size());
  for (const ShownTensor& tensor : shard) {
    entries.push_back({tensor.name, tensor.dtype, step.atom(tensor.atom).shape, 0, 0});
  }
  return entries;
}

const std::map<std::string, std::string>& Metadata() {
  static const std::map<std::string, std::string> metadata = {{"format", "pt"}};
  return metadata;
}

class HuggingFaceView : public View {
 public:
  HuggingFaceView(std::shared_ptr<const StepModel> step, std::vector<Shard> shards,
                  std::vector<ShownFile> files, std::vector<std::string> left_out)
      : step_(std::move(step)),
        shards_(std::move(shards)),
        files_(std::move(files)),
        left_out_(std::move(left_out)) {}

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override;
  Result<ViewEntry> Find(std::string_view path) const override;
  Result<Plan> MakePlan(std::string_view file) const override;
  std::vector<std::string> LeftOut() const override { return left_out_; }
  uint64_t MemoryBytes() const override;

 private:
  // The place of the first file at or behind `below` (a path below huggingface/).
  size_t Behind(std::string_view below) const;
  const ShownFile* FileAt(std::string_view path) const;
  bool HasFolder(std::string_view folder) const;

  const std::shared_ptr<const StepModel> step_;
  const std::vector<Shard> shards_;
  const std::vector<ShownFile> files_;  // sorted by path
  const std::vector<std::string> left_out_;
};

ViewEntry FolderNamed(std::string_view name) {
  return {std::string(name), ViewEntry::Type::kDirectory, 0, "", Reading::kRandom};
}

// The path behind "huggingface/"; "" for any other path.
std::string_view BelowTop(std::string_view path) {
  const bool below =
      path.starts_with(kTop) && path.size() > kTop.size() && path[kTop.size()] == '/';
  return below ? path.substr(kTop.size() + 1) : std::string_view();
}

size_t HuggingFaceView::Behind(std::string_view below) const {
  const auto found = std::lower_bound(
      files_.begin(), files_.end(), below,
      [](const ShownFile& file, std::string_view wanted) { return file.path < wanted; });
  return static_cast<size_t>(found - files_.begin());
}

const ShownFile* HuggingFaceView::FileAt(std::string_view path) const {
  const std::string_view below = BelowTop(path);
  const size_t at = Behind(below);
  return at < files_.size() && files_[at].path == below ? &files_[at] : nullptr;
}

// `folder` ends with '/'.
bool HuggingFaceView::HasFolder(std::string_view folder) const {
  const size_t at = Behind(folder);
  return at < files_.size() && files_[at].path.starts_with(folder);
}

Result<std::vector<ViewEntry>> HuggingFaceView::List(std::string_view directory) const {
  if (directory.empty()) return std::vector<ViewEntry>{FolderNamed(kTop)};
  const std::string folder = directory == kTop ? "" : StrCat(BelowTop(directory), "/");
  if (folder == "/" || !HasFolder(folder)) return NoSuch(directory);
  std::vector<ViewEntry> entries;
  for (size_t i = Behind(folder); i < files_.size() && files_[i].path.starts_with(folder); ++i) {
    const std::string_view rest = std::string_view(files_[i].path).substr(folder.size());
    const size_t slash = rest.find('/');
    if (slash == std::string_view::npos) {
      entries.push_back(files_[i].entry);
    } else if (entries.empty() || entries.back().name != rest.substr(0, slash)) {
      entries.push_back(FolderNamed(rest.substr(0, slash)));
    }
  }
  return entries;
}

Result<ViewEntry> HuggingFaceView::Find(std::string_view path) const {
  if (path == kTop) return FolderNamed(kTop);
  if (const ShownFile* file = FileAt(path)) return file->entry;
  const std::string_view below = BelowTop(path);
  if (below.empty() || !HasFolder(StrCat(below, "/"))) return NoSuch(path);
  return FolderNamed(LastComponent(below));
}

Result<Plan> HuggingFaceView::MakePlan(std::string_view path) const {
  const ShownFile* file = FileAt(path);
  if (file == nullptr) return NoSuch(path);
  PlanBuilder plan;
  if (const auto* held = std::get_if<TextOrBlob>(&file->body)) {
    if (const auto* blob = std::get_if<BlobIndex>(held)) {
      plan.BlobRange(*blob, 0, file->entry.size);
    } else {
      plan.Literal(std::get<std::shared_ptr<const std::string>>(*held));
    }
    return std::move(plan).Finish();
  }
  const Shard& shard = shards_[std::get<size_t>(file->body)];
  std::vector<SafetensorsEntry> entries = EntriesOf(*step_, shard);
  CKPT_ASSIGN_OR_RETURN(std::string header, RenderSafetensorsHeader(Metadata(), entries));
  plan.Literal(std::move(header));
  for (const ShownTensor& tensor : shard) plan.Append(tensor.bytes, tensor.Segment());
  return std::move(plan).Finish();
}

uint64_t HuggingFaceView::MemoryBytes() const {
  uint64_t bytes = sizeof(*this) + files_.size() * sizeof(ShownFile);
  for (const ShownFile& file : files_) {
    const auto* held = std::get_if<TextOrBlob>(&file.body);
    const bool text = held != nullptr && !std::holds_alternative<BlobIndex>(*held);
    bytes += file.path.capacity() + file.entry.name.capacity() + (text ? file.entry.size : 0);
  }
  for (const Shard& shard : shards_) {
    for (const ShownTensor& tensor : shard) {
      // The local tensor has one piece.
      bytes += sizeof(tensor) + tensor.name.capacity() + sizeof(LocalTensor) + sizeof(Piece) +
               6 * sizeof(uint64_t) * step_->atom(tensor.atom).shape.size();
    }
  }
  return bytes;
}

std::vector<Shard> SplitIntoShards(std::vector<ShownTensor> tensors) {
  std::vector<uint64_t> sizes;
  sizes.reserve(tensors.size());
  for (const ShownTensor& tensor : tensors) sizes.push_back(tensor.bytes);
  std::vector<Shard> shards;
  auto next = std::make_move_iterator(tensors.begin());
  for (const size_t count : huggingface::SplitShards(sizes)) {
    shards.emplace_back(next, next + static_cast<ptrdiff_t>(count));
    next += static_cast<ptrdiff_t>(count);
  }
  if (shards.empty()) shards.emplace_back();
  for (Shard& shard : shards) {
    std::stable_sort(shard.begin(), shard.end(), [](const ShownTensor& a, const ShownTensor& b) {
      return ByteWidth(a.dtype) > ByteWidth(b.dtype);
    });
  }
  return shards;
}

ShownFile FileOf(const std::string& path, uint64_t size, TextOrBlob body) {
  return {path,
          {std::string(LastComponent(path)), ViewEntry::Type::kFile, size, "", Reading::kRandom},
          std::move(body)};
}

ShownFile TextFile(const std::string& path, std::string text) {
  const uint64_t size = text.size();
  return FileOf(path, size, std::make_shared<const std::string>(std::move(text)));
}

// As save_pretrained cuts them, or the source's own files.
std::vector<Shard> ShardsOf(std::vector<ShownTensor> tensors,
                            const std::vector<WholeFile>& wholes) {
  if (wholes.empty()) return SplitIntoShards(std::move(tensors));
  std::vector<Shard> shards;
  for (const WholeFile& whole : wholes) {
    Shard& shard = shards.emplace_back();
    for (const size_t i : whole.tensors) shard.push_back(std::move(tensors[i]));
  }
  return shards;
}

uint64_t BytesOf(const Shard& shard) {
  uint64_t bytes = 0;
  for (const ShownTensor& tensor : shard) bytes += tensor.bytes;
  return bytes;
}

// `wholes`: the shards as files of the source, or empty.
Status AddWeights(const StepModel& step, const std::vector<Shard>& shards,
                  const std::vector<WholeFile>& wholes, std::vector<ShownFile>& files) {
  huggingface::WeightMap map;
  uint64_t total = 0, parameters = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = ShardName(i, shards.size());
    const uint64_t bytes = BytesOf(shards[i]);
    for (const ShownTensor& tensor : shards[i]) {
      map.emplace(tensor.name, name);
      parameters += tensor.trainable ? tensor.elements : 0;
    }
    total += bytes;
    ShownFile file{name, {name, ViewEntry::Type::kFile, 0, "", Reading::kMapped}, i};
    if (wholes.empty()) {
      CKPT_ASSIGN_OR_RETURN(const uint64_t header,
                            SafetensorsHeaderSize(Metadata(), EntriesOf(step, shards[i])));
      file.entry.size = header + bytes;
    } else {
      file.entry.size = step.blob(wholes[i].blob).stamp.size;
      file.body = TextOrBlob(wholes[i].blob);
    }
    files.push_back(std::move(file));
  }
  if (shards.size() < 2) return {};
  CKPT_ASSIGN_OR_RETURN(std::string index, huggingface::PrintShardIndex(map, total, parameters));
  files.push_back(TextFile(std::string(kIndexName), std::move(index)));
  return {};
}

// The config's dtype follows the shown weights, except where a Hugging Face directory is
// shown as it is.
std::string ConfigText(const StepModel& step, const Layout& layout, const std::string& config) {
  const auto shown = layout.dtype ? layout.dtype : step.model_dtype;
  const bool as_it_is = !layout.dtype && step.framework == "huggingface";
  return as_it_is || !shown ? config : WithDType(config, *shown);
}

void AddModelFiles(const StepModel& step, const Layout& layout, const ModelFiles& models,
                   std::vector<ShownFile>& files) {
  for (const ModelFile& file : models.files) {
    if (file.name == kModelConfig) {
      files.push_back(TextFile(file.name, ConfigText(step, layout, *file.text())));
      continue;
    }
    const auto* blob = std::get_if<BlobIndex>(&file.body);
    const uint64_t size = blob != nullptr ? step.blob(*blob).stamp.size : file.text()->size();
    files.push_back(FileOf(file.name, size, file.body));
  }
}

// Why there can be no directory of transformers, whatever its files.
Result<ConfigFacts> CheckStep(const StepModel& step, const Layout& layout,
                              const std::string& config) {
  CKPT_RETURN_IF_ERROR(CheckDegrees(step, layout));
  const Naming naming = layout.naming == Naming::kAsSource ? step.layout.naming : layout.naming;
  if (naming == Naming::kPipe) {
    return Fail(Error{ErrorCode::kUnsupported,
                      "its names are those of a pipeline, which transformers does not know"}
                    .Needing("add 'plain' to the layout"));
  }
  CKPT_ASSIGN_OR_RETURN(ConfigFacts facts, ReadConfigFacts(config));
  if (!facts.quantisation.empty() && layout.dtype) {
    return Fail(Error{ErrorCode::kUnsupported, StrCat("quantised weights (", facts.quantisation,
                                                      ") are only shown as "
                                                      "stored")}
                    .Needing("leave the dtype out of the layout"));
  }
  return facts;
}

}  // namespace

Result<std::shared_ptr<const View>> HuggingFaceFormat::Open(std::shared_ptr<const StepModel> step,
                                                            const Layout& layout) const {
  CKPT_ASSIGN_OR_RETURN(const ModelFiles own, ModelFilesOf(*step));
  const ModelFiles& models = own.config() == nullptr && given_ ? *given_ : own;
  if (models.config() == nullptr) {
    return Fail(
        Error{ErrorCode::kUnsupported, "no config.json in the step's directory or beside it"}
            .Needing("`mount --hf-config DIR` gives one"));
  }
  CKPT_ASSIGN_OR_RETURN(const ConfigFacts facts, CheckStep(*step, layout, *models.config()));
  CKPT_ASSIGN_OR_RETURN(const ShownNames names, NamesFor(*step, layout, families_));
  CKPT_ASSIGN_OR_RETURN(std::vector<ShownTensor> tensors,
                        huggingface::ShowTensors(*step, layout, names));
  // Transformers loads again what it saved with its config, whatever the names.
  std::vector<std::string> left_out;
  if (step->framework != "huggingface" || own.config() == nullptr) {
    CKPT_ASSIGN_OR_RETURN(left_out, huggingface::MatchConfig(*step, facts, tensors));
  }
  CKPT_ASSIGN_OR_RETURN(const auto wholes, huggingface::WholeFilesOf(*step, tensors));
  std::vector<Shard> shards = ShardsOf(std::move(tensors), wholes);
  std::vector<ShownFile> files;
  CKPT_RETURN_IF_ERROR(AddWeights(*step, shards, wholes, files));
  AddModelFiles(*step, layout, models, files);
  std::sort(files.begin(), files.end(),
            [](const ShownFile& a, const ShownFile& b) { return a.path < b.path; });
  return std::make_shared<const HuggingFaceView>(std::move(step), std::move(shards),
                                                 std::move(files), std::move(left_out));
}

}  // namespace ckptfs

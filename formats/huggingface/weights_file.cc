// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/weights_file.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/state/model_choice.h"
#include "formats/huggingface/names.h"
#include "formats/huggingface/torch_state.h"
#include "formats/torch/stored_tensor.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::huggingface {
namespace {

constexpr uint64_t kMaxDocumentBytes = 64 << 20;  // of a value's tensors, and of all pickles
constexpr size_t kMaxDocuments = 1024;

// True if a file says that it is torch's; some others say nothing.  tf and flax keep some
// matrices the other way round.
Result<bool> SaysTorch(const std::map<std::string, std::string>& metadata) {
  const auto format = metadata.find("format");
  if (format == metadata.end() || format->second == "mlx") return false;
  if (format->second == "pt") return true;
  return Fail(ErrorCode::kUnsupported,
              StrCat("its __metadata__ says format '", format->second, "', which is not torch's"));
}

bool IsOptimizers(const StoredWeight& weight) { return !OptimizerPrefixOf(weight.name).empty(); }

// Keeps the model of a flattened state, and names what else is in its file.
Status KeepModel(std::string_view asked, WeightsFile& file) {
  if (std::ranges::none_of(file.weights, IsOptimizers)) {
    if (asked.empty()) return {};
    return Fail(ErrorCode::kInvalid,
                StrCat("--model ", asked, ": a safetensors file has one model"));
  }
  std::vector<ModelCandidate::Tensor> tensors;
  for (const StoredWeight& weight : file.weights) {
    if (!IsOptimizers(weight)) tensors.push_back({weight.name, weight.dtype, weight.shape});
  }
  const std::vector<ModelCandidate> parts = SplitByFirstWord(tensors, tensors.size()).parts;
  CKPT_ASSIGN_OR_RETURN(const ModelChoice choice, ChooseModel(parts, asked));
  file.model = parts[choice.index].key;
  const std::string prefix = file.model.empty() ? "" : file.model + ".";
  const std::string why = choice.why.empty() ? "" : StrCat(" (", choice.why, ")");
  if (!prefix.empty()) file.aliases.clear();  // of names that the model does not have
  std::vector<StoredWeight> kept;
  for (StoredWeight& weight : file.weights) {
    const bool optimizer = IsOptimizers(weight);
    const size_t dot = weight.name.find('.');
    const bool own = file.model.empty() ? dot == weight.name.npos : weight.name.starts_with(prefix);
    if (!optimizer && own) {
      weight.name.erase(0, prefix.size());
      kept.push_back(std::move(weight));
      continue;
    }
    file.beside.push_back(
        {optimizer ? LeftOutPart::kOptimizer : LeftOutPart::kModel, StrCat("'", weight.name, "'"),
         StrCat("it is not of the model, which is ", ModelKeyText(file.model), why,
                ": a safetensors file does not say what else its tensors are"),
         ""});
  }
  file.weights = std::move(kept);
  file.data_offset.reset();  // nobody is shown the whole file
  return {};
}

Result<WeightsFile> ReadSafetensors(const Root& root, const std::string& path, BlobIndex blob,
                                    std::string_view asked) {
  CKPT_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadSafetensorsHeader(root, path));
  CKPT_ASSIGN_OR_RETURN(const bool torchs, SaysTorch(header.metadata));
  WeightsFile out;
  if (torchs) out.data_offset = header.data_offset;
  std::set<std::string_view> names;
  for (const SafetensorsEntry& entry : header.entries) {
    names.insert(entry.name);
    if (ByteWidth(entry.dtype) == 0) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("'", entry.name, "' is ", SafetensorsName(entry.dtype),
                         ": elements of less than a byte are not understood"));
    }
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(entry.shape));
    const Fragment fragment{0, elements, blob, header.data_offset + entry.begin, entry.dtype};
    out.weights.push_back(
        {entry.name, entry.dtype, entry.shape, {WholeTensor(entry.shape), fragment}, ""});
  }
  // safetensors.torch.save_model tells what it dropped: {second name: name}.
  for (const auto& [key, value] : header.metadata) {
    if (!names.contains(key) && names.contains(value)) out.aliases.emplace(key, value);
  }
  CKPT_RETURN_IF_ERROR(KeepModel(asked, out));
  return out;
}

uint64_t TensorBytes(const Document& document) {
  uint64_t bytes = 0;
  for (const StoredTensor& tensor : document.tensors) {
    const auto elements = ElementCount(tensor.shape);
    const uint64_t width = std::max<uint64_t>(ByteWidth(tensor.dtype), 1);
    if (!elements || *elements > kMaxDocumentBytes) return UINT64_MAX;
    bytes += *elements * width;
    if (bytes > kMaxDocumentBytes) break;
  }
  return bytes;
}

// A value of the script's own, as a document; it is left out alone where that cannot be.
void AddValue(const TorchState::Part& part, const TorchFile& file, BlobIndex blob,
              WeightsFile& out) {
  const std::string what = StrCat("'", part.key, "'");
  const std::string last = part.key.substr(part.key.rfind('.') + 1);
  const bool optimizer =
      IsOptimizerWord(last) || IsOptimizerWord(part.key.substr(0, part.key.find('.')));
  if (optimizer && part.value.IsNone()) return;
  uint64_t printed = 0;  // values that share a part are each printed with it
  for (const Document& one : out.documents) printed += one.pickle.size();
  if (out.documents.size() >= kMaxDocuments || printed > kMaxDocumentBytes) {
    out.beside.push_back(
        {LeftOutPart::kDocument, what, "there are too many values beside the model", ""});
    return;
  }
  const std::string key = part.key == "lr_scheduler" ? part.key : StrCat("client/", part.key);
  if (std::ranges::any_of(out.documents, [&](const Document& one) { return one.key == key; })) {
    out.beside.push_back({LeftOutPart::kDocument, what, "another value has the same key", ""});
    return;
  }
  auto document = MakeDocument(key, "", part.value, file, blob);
  if (optimizer && (!document || !document->tensors.empty())) {
    out.beside.push_back({LeftOutPart::kOptimizer, what,
                          "it is not what a torch optimizer's state_dict() returns", ""});
  } else if (!document) {
    out.beside.push_back({LeftOutPart::kDocument, what, document.error().message, ""});
  } else if (TensorBytes(*document) > kMaxDocumentBytes) {
    out.beside.push_back(
        {LeftOutPart::kDocument, what, "it has tensors of more than 64 MiB beside the model", ""});
  } else {
    out.documents.push_back(*std::move(document));
  }
}

void AddBeside(const TorchState::Model& model, const TorchFile& file, BlobIndex blob,
               WeightsFile& out) {
  for (const TorchState::Part& part : model.beside) {
    switch (part.kind) {
      case TorchState::Kind::kOptimizer: out.optimizers.push_back(part.key); break;
      case TorchState::Kind::kModel:
        out.beside.push_back({LeftOutPart::kModel, StrCat("'", part.key, "'"),
                              StrCat("a step has one model, and this "
                                     "one's is ",
                                     ModelKeyText(model.key), " (", model.why, ")"),
                              "--model KEY takes it instead"});
        break;
      case TorchState::Kind::kModule:
        out.beside.push_back({LeftOutPart::kModel, StrCat("'", part.key, "'"),
                              StrCat("it is a pickled module (", part.value.ClassName(), ")"), ""});
        break;
      case TorchState::Kind::kArrays:
        out.beside.push_back({LeftOutPart::kModel, StrCat("'", part.key, "'"),
                              "it is a state_dict of arrays that are not tensors", ""});
        break;
      case TorchState::Kind::kOddKey:
        out.beside.push_back({LeftOutPart::kDocument,
                              StrCat("an entry of ", ModelKeyText(part.key)),
                              "its key is neither a text nor a whole number", ""});
        break;
      case TorchState::Kind::kValue: AddValue(part, file, blob, out);
    }
  }
}

Result<WeightsFile> ReadTorch(const Root& root, const std::string& path, BlobIndex blob,
                              std::string_view asked) {
  CKPT_ASSIGN_OR_RETURN(auto opened, root.Open(path));
  CKPT_ASSIGN_OR_RETURN(const TorchFile file, TorchFile::Open(std::move(opened)));
  CKPT_ASSIGN_OR_RETURN(TorchState::Model model, TorchState(file.root()).Choose(asked));
  WeightsFile out;
  CKPT_ASSIGN_OR_RETURN(out.frame, file.Frame());
  out.left_out = std::move(model.left_out);
  for (auto& [name, value] : model.tensors) {
    CKPT_ASSIGN_OR_RETURN(const FileTensor tensor, FileTensorOf(value, file, blob, name));
    auto held = tensor.As(WholeTensor(tensor.shape()));
    if (!held) return Fail(std::move(held).error().WithContext(StrCat("'", name, "'")));
    const bool shared = tensor.elements() > 0 && tensor.dense();
    std::string storage = shared ? StrCat(tensor.storage_key(), "+", tensor.storage_offset(), " ",
                                          DTypeName(tensor.dtype()), ShapeToString(tensor.shape()))
                                 : "";
    out.weights.push_back(
        {std::move(name), tensor.dtype(), tensor.shape(), *std::move(held), std::move(storage)});
  }
  AddBeside(model, file, blob, out);
  out.model = std::move(model.key);
  out.twins = std::move(model.twins);
  out.modules = std::move(model.modules);
  return out;
}

}  // namespace

Result<SafetensorsHeader> ReadSafetensorsHeader(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto file, root.Open(path));
  if (file->size() < 8)
    return Fail(ErrorCode::kInvalid, "safetensors: shorter than its length field");
  CKPT_ASSIGN_OR_RETURN(const std::string first, file->Read(0, 8, "the header's length"));
  CKPT_ASSIGN_OR_RETURN(const uint64_t length, SafetensorsHeaderLength(first, file->size()));
  CKPT_ASSIGN_OR_RETURN(const std::string head, file->Read(0, 8 + length, "the header"));
  return ParseSafetensorsHeader(head, file->size());
}

Result<WeightsFile> ReadWeightsFile(const Root& root, const std::string& path, BlobIndex blob,
                                    std::string_view asked) {
  const bool torch = IsTorchName(path);
  auto out = torch ? ReadTorch(root, path, blob, asked) : ReadSafetensors(root, path, blob, asked);
  if (out) return out;
  Error error = std::move(out).error();
  const std::string name = root.PathOf(path);  // with which errors of reading begin
  return Fail(error.message.starts_with(name) ? std::move(error)
                                              : std::move(error).WithContext(name));
}

}  // namespace ckptfs::huggingface

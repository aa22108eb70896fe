// SPDX-License-Identifier: Apache-2.0
//
// Manifest bytes -> StepModel.  FlatBuffers' verifier proves the structure;
// everything it cannot know (indices, enums, extents, products) is checked
// here, so that later code may trust a loaded model as it trusts its own.
#include <algorithm>
#include <cstring>
#include <functional>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/manifest/facts_tables.h"
#include "core/manifest/manifest.h"
#include "core/manifest/manifest_check.h"
#include "core/manifest/manifest_format.h"
#include "core/manifest/old_facts.h"
#include "core/manifest/tables.h"
#include "core/model/side_blob.h"
#include "core/state/coverage.h"

namespace ckptfs {
namespace {

Digest ReadDigest(const fb::Digest* digest) {
  return digest == nullptr ? Digest{} : Digest{digest->high(), digest->low()};
}

// Where a stored root is: one that is not absolute lies below `blobs`.
Result<std::string> LocateRoot(const std::string& stored, std::string_view blobs) {
  if (stored.starts_with('/')) return stored;
  if (stored.empty()) return std::string(blobs);
  CKPT_RETURN_IF_ERROR(CheckBlobPath(stored));
  return blobs.empty() ? stored : StrCat(blobs, "/", stored);
}

class Reader {
 public:
  Reader(const fb::Manifest& manifest, std::string_view blobs)
      : manifest_(manifest), blobs_(blobs) {}
  Result<StepModel> Read();

 private:
  Status ReadHeader();
  Result<Layout> ReadLayout(const fb::Layout* table);
  Result<Blob> ReadBlob(const fb::Blob& table);
  Result<Pattern> ReadPattern(const fb::Pattern* table);
  Result<Parameter> ReadParameter(const fb::Parameter& table);
  Result<LocalTensor> ReadLocal(const fb::LocalTensor& table, const Shape& atom);
  Result<FragmentSeries> ReadSeries(const fb::FragmentSeries& stored);
  Result<Gather> ReadGather(const fb::Gather& table, const Shape& atom);
  Result<AtomSource> ReadSource(const fb::AtomSource* table, const Shape& atom);
  Result<Atom> ReadAtom(const fb::Atom& table);
  Result<Document> ReadDocument(const fb::Document& table);
  Result<StoredTensor> ReadStored(const fb::StoredTensor& table);
  Status ReadNames();
  Status ReadFacts();

  Result<ParameterIndex> Known(uint32_t parameter) const {
    if (parameter >= model_.parameters.size()) return Refuse("parameter index ", parameter);
    return ParameterIndex{parameter};
  }
  Result<ParameterIndex> OfModel(uint32_t number) const {
    CKPT_ASSIGN_OR_RETURN(const ParameterIndex index, Known(number));
    if (IsOfModel(model_.parameter(index))) return index;
    return Refuse("parameter index ", number, " is of a tensor beside the model");
  }

  const fb::Manifest& manifest_;
  const std::string_view blobs_;     // the store's blob directory
  std::vector<bool> root_is_store_;  // by root
  ProofBudget budget_;
  StepModel model_;
};

Status Reader::ReadHeader() {
  model_.framework = Text(manifest_.framework());
  model_.framework_version = Text(manifest_.framework_version());
  model_.id = Text(manifest_.id());
  model_.iteration = manifest_.iteration();
  model_.mtime_ns = manifest_.mtime_ns();
  model_.family = Text(manifest_.family());
  model_.family_rules = Text(manifest_.family_rules());
  for (uint32_t i = 0; manifest_.family_sizes() && i < manifest_.family_sizes()->size(); ++i) {
    const auto* size = manifest_.family_sizes()->Get(i);
    model_.family_sizes[Text(size->name())] = size->value();
  }
  model_.layers = manifest_.layers();
  model_.weights_apart = manifest_.weights_apart();
  for (const std::string& root : Texts(manifest_.roots())) {
    root_is_store_.push_back(!root.starts_with('/'));
    CKPT_ASSIGN_OR_RETURN(std::string here, LocateRoot(root, blobs_));
    model_.roots.push_back(std::move(here));
  }
  model_.notes = Texts(manifest_.notes());
  for (uint32_t i = 0; manifest_.left_out() && i < manifest_.left_out()->size(); ++i) {
    const auto* one = manifest_.left_out()->Get(i);
    CKPT_ASSIGN_OR_RETURN(const LeftOutPart part,
                          KnownEnum(one->part(), kLastLeftOutPart, "left_out"));
    model_.left_out.push_back(
        {part, Text(one->what()), Text(one->why()), Text(one->remedy()), one->more()});
    if (one->optimizer() != nullptr) {
      model_.left_out.back().optimizer = Text(one->optimizer()->bytes());
    }
  }
  for (uint32_t i = 0; manifest_.texts() && i < manifest_.texts()->size(); ++i) {
    const auto* one = manifest_.texts()->Get(i);
    SideText text{Text(one->path()), Text(one->text()), one->run_bits() & 0111};
    CKPT_RETURN_IF_ERROR(CheckBlobPath(text.path));
    model_.texts.push_back(std::move(text));
  }
  CKPT_ASSIGN_OR_RETURN(model_.layout, ReadLayout(manifest_.layout()));
  CKPT_ASSIGN_OR_RETURN(model_.model_dtype, OptionalDType(manifest_.model_dtype()));
  return {};
}

Result<Layout> Reader::ReadLayout(const fb::Layout* table) {
  if (table == nullptr || table->degrees() == nullptr || table->degrees()->size() != 8) {
    return Refuse("layout: it must have eight degrees");
  }
  Layout layout;
  uint32_t* const fields[] = {&layout.tp,  &layout.pp, &layout.dp,  &layout.ep,
                              &layout.etp, &layout.cp, &layout.vpp, &layout.zero};
  for (uint32_t i = 0; i < 8; ++i) *fields[i] = table->degrees()->Get(i);
  CKPT_ASSIGN_OR_RETURN(layout.dtype, OptionalDType(table->dtype()));
  layout.split = Vector(table->split());
  CKPT_ASSIGN_OR_RETURN(layout.naming, KnownEnum(table->naming(), Naming::kPipe, "naming"));
  CKPT_ASSIGN_OR_RETURN(const Layout again, Layout::Parse(layout.ToString()));
  if (again != layout) return Refuse("layout: ", layout.ToString(), " is not canonical");
  return layout;
}

Result<Blob> Reader::ReadBlob(const fb::Blob& table) {
  Blob blob;
  blob.root = table.root();
  if (blob.root >= model_.roots.size()) return Refuse("root index ", blob.root);
  blob.path = Text(table.path());
  CKPT_RETURN_IF_ERROR(CheckBlobPath(blob.path));
  if (table.stamp() == nullptr) return Refuse("its stamp is missing");
  blob.stamp = BlobStamp{table.stamp()->size(), table.stamp()->mtime_ns(),
                         table.stamp()->ctime_ns(), table.stamp()->inode()};
  blob.fingerprint = ReadDigest(table.fingerprint());
  blob.content = ReadDigest(table.content());
  blob.mode = table.mode();
  blob.uid = table.uid();
  blob.gid = table.gid();
  blob.store_owned = table.store_owned();
  blob.side = table.side();
  blob.frame = ReadDigest(table.frame());
  blob.chunk_bytes = table.chunk_bytes();
  blob.chunk_list = ReadDigest(table.chunk_list());
  if (table.chunks() != nullptr) {
    blob.chunks.reserve(table.chunks()->size());
    for (uint32_t i = 0; i < table.chunks()->size(); ++i) {
      fb::Digest chunk;
      std::memcpy(&chunk, table.chunks()->Data() + i * sizeof(chunk), sizeof(chunk));
      blob.chunks.push_back(ReadDigest(&chunk));
    }
  }
  CKPT_RETURN_IF_ERROR(CheckIdentity(blob, root_is_store_[blob.root]));
  return blob;
}

// Finds the expert id where a manifest does not say its place in the name: in the
// component behind one that ends in "experts", else in the last component that is
// the id, else in the last run of digits that is ("linear_fc1.weight3").
uint32_t ExpertAtOf(const Parameter& parameter) {
  const std::string id = std::to_string(*parameter.expert);
  const std::string behind = StrCat("experts.", id, ".");
  if (const size_t at = parameter.name.find(behind); at != std::string::npos) {
    return static_cast<uint32_t>(at + std::string_view("experts.").size());
  }
  const std::string dotted = StrCat(".", parameter.name, ".");
  if (const size_t at = dotted.rfind(StrCat(".", id, ".")); at != std::string::npos) {
    return static_cast<uint32_t>(at);
  }
  Parameter tried = parameter;
  for (size_t at = parameter.name.rfind(id); at != std::string::npos && at > 0;
       at = parameter.name.rfind(id, at - 1)) {
    tried.expert_at = static_cast<uint32_t>(at);
    if (NamesItsExpert(tried)) return tried.expert_at;
  }
  return 0;
}

Result<Pattern> Reader::ReadPattern(const fb::Pattern* table) {
  Pattern pattern;
  if (table == nullptr) return pattern;
  CKPT_ASSIGN_OR_RETURN(pattern.kind,
                        KnownEnum(table->kind(), PatternKind::kShard, "pattern kind"));
  CKPT_RETURN_IF_ERROR(
      ReadAll(table->cuts(), pattern.cuts, "cut", [](const fb::Cut& cut) -> Result<Cut> {
        return Cut{cut.dim(),        Vector(cut.parts()), cut.pad_multiple(),
                   cut.pad_always(), cut.unit(),          Vector(cut.widths())};
      }));
  pattern.grid = Vector(table->grid());
  pattern.bias_scaled = table->bias_scaled();
  return pattern;
}

Result<Parameter> Reader::ReadParameter(const fb::Parameter& table) {
  Parameter parameter;
  parameter.name = Text(table.name());
  if (parameter.name.empty()) return Refuse("its name is missing");
  CKPT_ASSIGN_OR_RETURN(parameter.shape, ReadShape(table.shape()));
  CKPT_ASSIGN_OR_RETURN(parameter.role, KnownEnum(table.role(), Role::kBeside, "role"));
  CKPT_ASSIGN_OR_RETURN(parameter.pattern, ReadPattern(table.pattern()));
  if (table.source_pattern() != nullptr) {
    CKPT_ASSIGN_OR_RETURN(parameter.source_pattern, ReadPattern(table.source_pattern()));
  }
  CKPT_ASSIGN_OR_RETURN(parameter.stage,
                        KnownEnum(table.stage(), StageRule::kFirstLast, "stage rule"));
  parameter.layer = table.layer();
  parameter.source_stages = Vector(table.source_stages());
  const std::vector<uint32_t>& stages = parameter.source_stages;
  if (std::ranges::adjacent_find(stages, std::greater_equal()) != stages.end() ||
      (!stages.empty() && stages.back() >= model_.layout.pp)) {
    return Refuse("its source's pipeline stages must rise and stay below ", model_.layout.pp);
  }
  if (table.expert() < -1 || table.expert() > UINT32_MAX)
    return Refuse(
        "its expert number is out "
        "of range");
  if (table.expert() >= 0) parameter.expert = static_cast<uint32_t>(table.expert());
  parameter.stacked_experts = table.stacked_experts();
  if (parameter.expert) {
    parameter.expert_at =
        table.expert_at() >= 0 ? static_cast<uint32_t>(table.expert_at()) : ExpertAtOf(parameter);
    if (!NamesItsExpert(parameter))
      return Refuse("'", parameter.name, "' does not name its expert");
  }
  return parameter;
}

Result<LocalTensor> Reader::ReadLocal(const fb::LocalTensor& table, const Shape& atom) {
  if (table.whole()) return WholeTensor(atom);
  LocalTensor local;
  CKPT_ASSIGN_OR_RETURN(local.shape, ReadShape(table.shape()));
  CKPT_RETURN_IF_ERROR(
      ReadAll(table.pieces(), local.pieces, "piece", [](const fb::Piece& stored) -> Result<Piece> {
        Piece piece;
        CKPT_ASSIGN_OR_RETURN(piece.shape, ReadShape(stored.shape()));
        piece.atom_begin = Vector(stored.atom_begin());
        piece.local_offset = stored.local_offset();
        piece.local_strides = Vector(stored.local_strides());
        piece.scale = stored.scale();
        return piece;
      }));
  CKPT_RETURN_IF_ERROR(ValidateLocal(local, atom));
  return local;
}

Result<FragmentSeries> Reader::ReadSeries(const fb::FragmentSeries& stored) {
  FragmentSeries series;
  series.local = stored.local();
  series.count = stored.count();
  series.flat_begin = stored.flat_begin();
  series.flat_step = stored.flat_step();
  series.elements = stored.elements();
  series.blob = stored.blob();
  series.blob_step = stored.blob_step();
  series.offset = stored.offset();
  series.offset_step = stored.offset_step();
  CKPT_ASSIGN_OR_RETURN(series.dtype, KnownDType(stored.dtype()));
  return series;
}

Result<Gather> Reader::ReadGather(const fb::Gather& table, const Shape& atom) {
  Gather gather;
  CKPT_RETURN_IF_ERROR(
      ReadAll(table.locals(), gather.locals, "local tensor",
              [&](const fb::LocalTensor& local) { return ReadLocal(local, atom); }));
  if (table.series() != nullptr) {
    gather.series.reserve(table.series()->size());
    for (uint32_t i = 0; i < table.series()->size(); ++i) {
      fb::FragmentSeries stored;
      std::memcpy(&stored, table.series()->Data() + i * sizeof(stored), sizeof(stored));
      CKPT_ASSIGN_OR_RETURN(const FragmentSeries series, ReadSeries(stored));
      CKPT_RETURN_IF_ERROR(CheckSeries(series, gather.locals, model_.blobs));
      gather.series.push_back(series);
    }
  }
  CKPT_RETURN_IF_ERROR(ProveCoverage(gather, atom, budget_));
  return gather;
}

Result<AtomSource> Reader::ReadSource(const fb::AtomSource* table, const Shape& atom) {
  if (table == nullptr) return Refuse("its source is missing");
  AtomSource source;
  CKPT_ASSIGN_OR_RETURN(source.kind, SourceKindOf(table->kind()));
  CKPT_RETURN_IF_ERROR(ReadAll(table->gathers(), source.gathers, "gather",
                               [&](const fb::Gather& gather) { return ReadGather(gather, atom); }));
  source.of = AtomIndex{table->of()};
  source.inline_bytes = Text(table->inline_bytes());
  source.python_number = table->python_number();
  return source;
}

Result<Atom> Reader::ReadAtom(const fb::Atom& table) {
  Atom atom;
  CKPT_ASSIGN_OR_RETURN(atom.parameter, Known(table.parameter()));
  atom.optimizer = Text(table.optimizer());
  atom.kind = Text(table.kind());
  CKPT_ASSIGN_OR_RETURN(atom.dtype, KnownDType(table.dtype()));
  CKPT_ASSIGN_OR_RETURN(atom.shape, ReadShape(table.shape()));
  CKPT_RETURN_IF_ERROR(ByteCount(atom.shape, atom.dtype));
  CKPT_ASSIGN_OR_RETURN(atom.relation, KnownEnum(table.relation(), Relation::kOpaque, "relation"));
  if (atom.relation == Relation::kSame && atom.shape != model_.parameter(atom.parameter).shape) {
    return Refuse("shape ", ShapeToString(atom.shape), " is not its parameter's");
  }
  CKPT_ASSIGN_OR_RETURN(atom.source, ReadSource(table.source(), atom.shape));
  atom.derived = table.derived();
  return atom;
}

Result<StoredTensor> Reader::ReadStored(const fb::StoredTensor& table) {
  StoredTensor tensor;
  CKPT_ASSIGN_OR_RETURN(tensor.dtype, KnownDType(table.dtype()));
  CKPT_ASSIGN_OR_RETURN(tensor.shape, ReadShape(table.shape()));
  tensor.strides = Vector(table.strides());
  tensor.blob = BlobIndex{table.blob()};
  tensor.offset = table.offset();
  if (table.atom() < -1 || table.atom() >= static_cast<int64_t>(model_.atoms.size())) {
    return Refuse("atom index ", table.atom());
  }
  if (table.atom() >= 0) tensor.atom = AtomIndex{static_cast<uint32_t>(table.atom())};
  CKPT_RETURN_IF_ERROR(CheckStoredTensor(tensor, model_));
  return tensor;
}

Result<Document> Reader::ReadDocument(const fb::Document& table) {
  Document document;
  document.key = Text(table.key());
  document.scope = Text(table.scope());
  document.pickle = Text(table.pickle());
  CKPT_RETURN_IF_ERROR(ReadAll(table.tensors(), document.tensors, "tensor",
                               [this](const fb::StoredTensor& t) { return ReadStored(t); }));
  return document;
}

// Aliases, groups and documents.
Status Reader::ReadNames() {
  CKPT_RETURN_IF_ERROR(ReadAll(manifest_.aliases(), model_.aliases, "alias",
                               [this](const fb::Alias& table) -> Result<Alias> {
                                 CKPT_ASSIGN_OR_RETURN(const auto index,
                                                       OfModel(table.parameter()));
                                 return Alias{Text(table.name()), index};
                               }));
  CKPT_RETURN_IF_ERROR(ReadAll(manifest_.groups(), model_.groups, "group",
                               [this](const fb::Group& table) -> Result<Group> {
                                 Group group;
                                 group.optimizer = Text(table.optimizer());
                                 for (uint32_t member : Vector(table.parameters())) {
                                   CKPT_ASSIGN_OR_RETURN(const auto index, OfModel(member));
                                   group.parameters.push_back(index);
                                 }
                                 group.hyper_parameters = Text(table.hyper_parameters());
                                 if (table.number() > UINT32_MAX || table.number() < -1)
                                   return Refuse("group number ", table.number());
                                 if (table.number() >= 0)
                                   group.number = static_cast<uint32_t>(table.number());
                                 return group;
                               }));
  return ReadAll(manifest_.documents(), model_.documents, "document",
                 [this](const fb::Document& table) { return ReadDocument(table); });
}

Status Reader::ReadFacts() {
  if (manifest_.facts() == nullptr) {
    TakeOldFacts(model_);
    return {};
  }
  auto facts = ckptfs::ReadFacts(*manifest_.facts());
  if (!facts) return Fail(std::move(facts).error().WithContext("facts"));
  model_.facts = *std::move(facts);
  return CheckFacts(model_.facts, model_.blobs);
}

Result<StepModel> Reader::Read() {
  CKPT_RETURN_IF_ERROR(ReadHeader());
  CKPT_RETURN_IF_ERROR(ReadAll(manifest_.blobs(), model_.blobs, "blob",
                               [this](const fb::Blob& table) { return ReadBlob(table); }));
  CKPT_RETURN_IF_ERROR(
      ReadAll(manifest_.parameters(), model_.parameters, "parameter",
              [this](const fb::Parameter& table) { return ReadParameter(table); }));
  CKPT_RETURN_IF_ERROR(ReadAll(manifest_.atoms(), model_.atoms, "atom",
                               [this](const fb::Atom& table) { return ReadAtom(table); }));
  CKPT_RETURN_IF_ERROR(ReadNames());
  CKPT_RETURN_IF_ERROR(ReadFacts());
  CKPT_RETURN_IF_ERROR(CheckAtomSources(model_));
  CKPT_RETURN_IF_ERROR(CheckSideBlob(model_));
  model_.BuildIndex();
  return std::move(model_);
}

}  // namespace

Result<StepModel> ParseManifest(std::string_view bytes, std::string_view blobs) {
  CKPT_ASSIGN_OR_RETURN(const ManifestEnvelope envelope, OpenManifest(bytes));
  const auto* data = reinterpret_cast<const uint8_t*>(envelope.payload.data());
  // Copied when the caller's bytes are not aligned as the payload wants.
  std::string aligned;
  if (reinterpret_cast<uintptr_t>(data) % 8 != 0) {
    aligned = envelope.payload;
    data = reinterpret_cast<const uint8_t*>(aligned.data());
  }
  constexpr uint32_t kMaxDepth = 16;
  const auto max_tables = static_cast<uint32_t>(envelope.payload.size() / 4 + 16);
  flatbuffers::Verifier verifier(data, envelope.payload.size(), kMaxDepth, max_tables);
  if (!fb::VerifyManifestBuffer(verifier)) {
    return Fail(ErrorCode::kInvalid, "manifest: its structure is not that of the schema");
  }
  auto model = Reader(*fb::GetManifest(data), blobs).Read();
  if (!model) return Fail(std::move(model).error().WithContext("manifest"));
  return model;
}

}  // namespace ckptfs

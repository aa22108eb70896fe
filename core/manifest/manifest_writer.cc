// SPDX-License-Identifier: Apache-2.0
//
// StepModel -> manifest bytes.  The order of construction is fixed, so equal
// models give equal bytes.
#include <span>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/blob/chunk_list.h"
#include "core/manifest/facts_tables.h"
#include "core/manifest/manifest.h"
#include "core/manifest/manifest_format.h"
#include "core/manifest/old_facts.h"
#include "core/manifest/tables.h"
#include "core/model/read_blobs.h"
#include "core/model/side_blob.h"

namespace ckptfs {
namespace {

class Writer : private TableBuilder {
 public:
  Writer(const StepModel& model, std::string_view blobs, uint64_t bound)
      : TableBuilder(bound), model_(model), blobs_(blobs) {}

  // The payload.  Lifetime: the writer's.
  std::string_view Write() {
    return Write(model_.blobs, model_.notes, model_.mtime_ns, model_.texts, model_.left_out);
  }
  // Builds of before had all digests in the manifest: the step is the same.
  std::string_view Write(const StepIdentity& of) {
    lists_all_ = true;
    return Write(of.blobs, of.notes, of.mtime_ns, {}, {});
  }

 private:
  std::string_view Write(std::span<const Blob> blobs, const std::vector<std::string>& notes,
                         int64_t mtime_ns, std::span<const SideText> texts,
                         std::span<const LeftOut> left_out);
  std::string StoredRoot(const std::string& root) const;
  Offset<fb::Blob> WriteBlob(const Blob& blob);
  Offset<fb::Layout> WriteLayout(const Layout& layout);
  Offset<fb::Pattern> WritePattern(const Pattern& pattern);
  Offset<fb::Parameter> WriteParameter(const Parameter& parameter);
  Offset<fb::LocalTensor> WriteLocal(const LocalTensor& local, const LocalTensor& whole);
  Offset<fb::Gather> WriteGather(const Gather& gather, const LocalTensor& whole);
  Offset<fb::Atom> WriteAtom(const Atom& atom);
  Offset<fb::Document> WriteDocument(const Document& document);
  VectorOffset<Offset<fb::LeftOut>> WriteLeftOut(std::span<const LeftOut> all);

  const StepModel& model_;
  const std::string_view blobs_;  // the store's blob directory
  bool lists_all_ = false;        // chunks that a list would have are written as in one
};

int16_t Optional(const std::optional<DType>& dtype) {
  return dtype ? static_cast<int16_t>(*dtype) : int16_t{-1};
}

// Below the store's blob directory a root is written without it.
std::string Writer::StoredRoot(const std::string& root) const {
  if (blobs_.empty() || !root.starts_with(blobs_)) return root;
  const std::string_view below = std::string_view(root).substr(blobs_.size());
  if (below.empty()) return {};
  return below.front() == '/' ? std::string(below.substr(1)) : root;
}

Offset<fb::Blob> Writer::WriteBlob(const Blob& blob) {
  const auto path = Bytes(blob.path);
  Digest chunk_list = blob.chunk_list;
  if (lists_all_ && NeedsChunkList(blob)) chunk_list = DigestOfChunks(blob.chunks);
  const bool listed = chunk_list != Digest{};
  std::vector<fb::Digest> chunks;
  chunks.reserve(listed ? 0 : blob.chunks.size());
  for (const Digest& chunk : blob.chunks) {
    if (!listed) chunks.emplace_back(chunk.high, chunk.low);
  }
  const auto chunk_vector = chunks.empty() ? 0 : builder_.CreateVectorOfStructs(chunks);
  const fb::BlobStamp stamp(blob.stamp.size, blob.stamp.mtime_ns, blob.stamp.ctime_ns,
                            blob.stamp.inode);
  const fb::Digest fingerprint(blob.fingerprint.high, blob.fingerprint.low);
  const fb::Digest content(blob.content.high, blob.content.low);
  const fb::Digest frame(blob.frame.high, blob.frame.low);
  const fb::Digest list(chunk_list.high, chunk_list.low);
  return fb::CreateBlob(builder_, blob.root, path, &stamp, &fingerprint, &content, blob.mode,
                        blob.uid, blob.gid, blob.store_owned, blob.chunk_bytes, chunk_vector,
                        blob.side, blob.frame == Digest{} ? nullptr : &frame,
                        listed ? &list : nullptr);
}

Offset<fb::Layout> Writer::WriteLayout(const Layout& layout) {
  const std::vector<uint32_t> degrees = {layout.tp,  layout.pp, layout.dp,  layout.ep,
                                         layout.etp, layout.cp, layout.vpp, layout.zero};
  const auto degree_vector = Vector(degrees);
  const auto split = Vector(layout.split);
  return fb::CreateLayout(builder_, degree_vector, Optional(layout.dtype), split,
                          static_cast<uint8_t>(layout.naming));
}

Offset<fb::Pattern> Writer::WritePattern(const Pattern& pattern) {
  const auto cuts = Tables<fb::Cut>(pattern.cuts, [this](const Cut& cut) {
    const auto parts = Vector(cut.parts);
    const auto widths = Vector(cut.widths);
    return fb::CreateCut(builder_, cut.dim, parts, cut.pad_multiple, cut.pad_always, cut.unit,
                         widths);
  });
  const auto grid = Vector(pattern.grid);
  return fb::CreatePattern(builder_, static_cast<uint8_t>(pattern.kind), cuts, grid,
                           pattern.bias_scaled);
}

Offset<fb::Parameter> Writer::WriteParameter(const Parameter& parameter) {
  const auto name = Bytes(parameter.name);
  const auto shape = Vector(parameter.shape);
  const auto pattern = WritePattern(parameter.pattern);
  const auto source_pattern =
      parameter.source_pattern ? WritePattern(*parameter.source_pattern) : Offset<fb::Pattern>(0);
  const auto source_stages = Vector(parameter.source_stages);
  return fb::CreateParameter(
      builder_, name, shape, static_cast<uint8_t>(parameter.role), pattern,
      static_cast<uint8_t>(parameter.stage), parameter.layer,
      parameter.expert ? int64_t{*parameter.expert} : int64_t{-1}, parameter.stacked_experts,
      parameter.expert ? int64_t{parameter.expert_at} : int64_t{-1}, source_pattern, source_stages);
}

Offset<fb::LocalTensor> Writer::WriteLocal(const LocalTensor& local, const LocalTensor& whole) {
  if (local == whole) return fb::CreateLocalTensor(builder_, true);
  const auto shape = Vector(local.shape);
  const auto pieces = Tables<fb::Piece>(local.pieces, [this](const Piece& piece) {
    const auto box = Vector(piece.shape);
    const auto begin = Vector(piece.atom_begin);
    const auto strides = Vector(piece.local_strides);
    return fb::CreatePiece(builder_, box, begin, piece.local_offset, strides, piece.scale);
  });
  return fb::CreateLocalTensor(builder_, false, shape, pieces);
}

Offset<fb::Gather> Writer::WriteGather(const Gather& gather, const LocalTensor& whole) {
  const auto locals = Tables<fb::LocalTensor>(
      gather.locals, [&](const LocalTensor& local) { return WriteLocal(local, whole); });
  std::vector<fb::FragmentSeries> series;
  series.reserve(gather.series.size());
  for (const FragmentSeries& s : gather.series) {
    series.emplace_back(s.flat_begin, s.flat_step, s.elements, s.blob_step, s.offset, s.offset_step,
                        s.local, s.count, s.blob, static_cast<uint8_t>(s.dtype));
  }
  const auto series_vector = builder_.CreateVectorOfStructs(series);
  return fb::CreateGather(builder_, locals, series_vector);
}

Offset<fb::Atom> Writer::WriteAtom(const Atom& atom) {
  const LocalTensor whole = WholeTensor(atom.shape);
  const auto gathers = Tables<fb::Gather>(
      atom.source.gathers, [&](const Gather& gather) { return WriteGather(gather, whole); });
  const auto inline_bytes = Bytes(atom.source.inline_bytes);
  const auto source = fb::CreateAtomSource(builder_, static_cast<uint8_t>(atom.source.kind),
                                           gathers, static_cast<uint32_t>(atom.source.of),
                                           inline_bytes, atom.source.python_number);
  const auto optimizer = Bytes(atom.optimizer);
  const auto kind = Bytes(atom.kind);
  const auto shape = Vector(atom.shape);
  return fb::CreateAtom(builder_, static_cast<uint32_t>(atom.parameter), optimizer, kind,
                        static_cast<uint8_t>(atom.dtype), shape,
                        static_cast<uint8_t>(atom.relation), source, atom.derived);
}

Offset<fb::Document> Writer::WriteDocument(const Document& document) {
  const auto key = Bytes(document.key);
  const auto scope = Bytes(document.scope);
  const auto pickle = Bytes(document.pickle);
  const auto tensors =
      Tables<fb::StoredTensor>(document.tensors, [this](const StoredTensor& tensor) {
        const auto shape = Vector(tensor.shape);
        const auto strides = Vector(tensor.strides);
        return fb::CreateStoredTensor(builder_, static_cast<uint8_t>(tensor.dtype), shape, strides,
                                      static_cast<uint32_t>(tensor.blob), tensor.offset,
                                      tensor.atom ? static_cast<int64_t>(*tensor.atom) : -1);
      });
  return fb::CreateDocument(builder_, key, scope, pickle, tensors);
}

VectorOffset<Offset<fb::LeftOut>> Writer::WriteLeftOut(std::span<const LeftOut> all) {
  return Tables<fb::LeftOut>(all, [this](const LeftOut& one) {
    const auto what = Bytes(one.what);
    const auto why = Bytes(one.why);
    const auto remedy = Bytes(one.remedy);
    const auto optimizer =
        one.optimizer ? fb::CreateText(builder_, Bytes(*one.optimizer)) : Offset<fb::Text>(0);
    return fb::CreateLeftOut(builder_, static_cast<uint8_t>(one.part), what, why, remedy, one.more,
                             optimizer);
  });
}

std::string_view Writer::Write(std::span<const Blob> step_blobs,
                               const std::vector<std::string>& step_notes, int64_t mtime_ns,
                               std::span<const SideText> step_texts,
                               std::span<const LeftOut> step_left_out) {
  const auto framework = Bytes(model_.framework);
  const auto framework_version = Bytes(model_.framework_version);
  const auto id = Bytes(model_.id);
  const auto layout = WriteLayout(model_.layout);
  const auto family = Bytes(model_.family);
  std::vector<std::string> root_texts;
  for (const std::string& root : model_.roots) root_texts.push_back(StoredRoot(root));
  const auto roots = Texts(root_texts);
  const auto blobs = Tables<fb::Blob>(step_blobs, [this](const Blob& b) { return WriteBlob(b); });
  const auto parameters = Tables<fb::Parameter>(
      model_.parameters, [this](const Parameter& p) { return WriteParameter(p); });
  const auto atoms = Tables<fb::Atom>(model_.atoms, [this](const Atom& a) { return WriteAtom(a); });
  const auto aliases = Tables<fb::Alias>(model_.aliases, [this](const Alias& alias) {
    const auto name = Bytes(alias.name);
    return fb::CreateAlias(builder_, name, static_cast<uint32_t>(alias.parameter));
  });
  const auto groups = Tables<fb::Group>(model_.groups, [this](const Group& group) {
    std::vector<uint32_t> members;
    for (ParameterIndex member : group.parameters) members.push_back(static_cast<uint32_t>(member));
    const auto optimizer = Bytes(group.optimizer);
    const auto member_vector = Vector(members);
    const auto hyper = Bytes(group.hyper_parameters);
    return fb::CreateGroup(builder_, optimizer, member_vector, hyper,
                           group.number ? int64_t{*group.number} : -1);
  });
  const auto documents = Tables<fb::Document>(
      model_.documents, [this](const Document& d) { return WriteDocument(d); });
  const auto notes = Texts(step_notes);
  const auto family_rules = model_.family_rules.empty() ? 0 : Bytes(model_.family_rules);
  std::vector<Offset<fb::FamilySize>> sizes;
  for (const auto& [name, value] : model_.family_sizes) {
    const auto bytes = Bytes(name);
    sizes.push_back(fb::CreateFamilySize(builder_, bytes, value));
  }
  const auto family_sizes = sizes.empty() ? 0 : builder_.CreateVector(sizes);
  std::vector<Offset<fb::SideText>> side_texts;
  for (const SideText& one : step_texts) {
    const auto path = Bytes(one.path);
    const auto text = Bytes(one.text);
    side_texts.push_back(fb::CreateSideText(builder_, path, text, one.run_bits));
  }
  const auto texts = side_texts.empty() ? 0 : builder_.CreateVector(side_texts);
  const auto left_out = WriteLeftOut(step_left_out);
  // Without the table documents of such names would be taken for those of older builds.
  const bool facts_told = model_.facts != StepFacts() || HasDocumentNamedAsFact(model_);
  const auto facts = facts_told ? WriteFacts(*this, model_.facts) : Offset<fb::Facts>(0);
  builder_.Finish(
      fb::CreateManifest(builder_, framework, framework_version, id, model_.iteration, mtime_ns,
                         layout, Optional(model_.model_dtype), family, model_.layers, roots, blobs,
                         parameters, atoms, aliases, groups, documents, notes, family_rules,
                         family_sizes, model_.weights_apart, texts, left_out, facts),
      fb::ManifestIdentifier());
  return {reinterpret_cast<const char*>(builder_.GetBufferPointer()), builder_.GetSize()};
}

uint64_t UpperBound(const Pattern& pattern) {
  uint64_t bytes = 64 + 8 * pattern.grid.size();
  for (const Cut& cut : pattern.cuts) bytes += 64 + 8 * (cut.parts.size() + cut.widths.size());
  return bytes;
}

// A generous upper bound: FlatBuffers ends the process above 2 GiB.
uint64_t UpperBound(const StepModel& model) {
  uint64_t bytes = 4096;
  for (const auto& text : model.roots) bytes += 64 + text.size();
  for (const auto& text : model.notes) bytes += 64 + text.size();
  for (const LeftOut& one : model.left_out) {
    bytes += 256 + one.what.size() + one.why.size() + one.remedy.size() +
             (one.optimizer ? one.optimizer->size() : 0);
  }
  for (const SideText& one : model.texts) bytes += 128 + one.path.size() + one.text.size();
  bytes += model.family_rules.size() + UpperBound(model.facts);
  for (const auto& [name, value] : model.family_sizes) bytes += 64 + name.size();
  for (const Blob& blob : model.blobs) {
    const bool listed = blob.chunk_list != Digest{};
    bytes += 256 + blob.path.size() + (listed ? 0 : 16 * blob.chunks.size());
  }
  for (const Parameter& p : model.parameters) {
    bytes += 256 + p.name.size() + 8 * p.shape.size() + 4 * p.source_stages.size();
    bytes += UpperBound(p.pattern) + (p.source_pattern ? UpperBound(*p.source_pattern) : 0);
  }
  for (const Atom& atom : model.atoms) {
    bytes += 256 + atom.kind.size() + atom.optimizer.size() + atom.source.inline_bytes.size() +
             8 * atom.shape.size();
    for (const Gather& gather : atom.source.gathers) {
      bytes += 64 + 64 * gather.series.size();
      for (const LocalTensor& local : gather.locals) {
        bytes += 64 + 8 * local.shape.size();
        for (const Piece& piece : local.pieces) bytes += 96 + 24 * piece.shape.size();
      }
    }
  }
  for (const Alias& alias : model.aliases) bytes += 64 + alias.name.size();
  for (const Group& g : model.groups) {
    bytes += 128 + g.optimizer.size() + 4 * g.parameters.size() + g.hyper_parameters.size();
  }
  for (const Document& d : model.documents) {
    bytes += 128 + d.key.size() + d.scope.size() + d.pickle.size();
    for (const StoredTensor& t : d.tensors) bytes += 96 + 16 * t.shape.size();
  }
  return bytes;
}

Result<uint64_t> CheckedBound(const StepModel& model) {
  const uint64_t bound = UpperBound(model);
  if (bound <= kManifestMaxPayload) return bound;
  return Fail(ErrorCode::kExhausted, StrCat("manifest: up to ", bound, " bytes, more than 2 GiB"));
}

}  // namespace

Result<std::string> RenderManifest(const StepModel& model, std::string_view blobs) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t bound, CheckedBound(model));
  return WrapManifest(Writer(model, blobs, bound).Write());
}

Result<Digest> IdentityDigest(const StepModel& model, std::string_view blobs) {
  if (FindSideBlob(model)) return IdentityDigest(WithoutSideBlob(model), blobs);
  CKPT_ASSIGN_OR_RETURN(const uint64_t bound, CheckedBound(model));
  return DigestOf(Writer(model, blobs, bound).Write(IdentityOf(model)));
}

}  // namespace ckptfs

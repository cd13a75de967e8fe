"""The Streamlit app: shows what the store holds."""
